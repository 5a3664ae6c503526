"""Perplexity over sequences of a split, or over its documents as streams in constant state."""

import logging
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.model.llama import PIECE, Llama
from infini_llama.model.loss import IGNORE_INDEX
from infini_llama.tasks.preprocess.tokens.order import representative_rows
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.progress import Reached
from infini_llama.tasks.records.evaluation import TextLoss
from infini_llama.tasks.train.worker.data.loader import to_batch

log = logging.getLogger("infini_llama.evaluate")
BATCH = 8  # rows
CHUNK = 512  # tokens whose logits are in memory at the same time
PLACES = 8  # parts of a row with losses of their own, where there are no segments


@dataclass
class Measured:
    """Sums over targets.

    Attributes:
        by_place: nats, targets and bytes of text at each place in a row, [3, length].
    """

    by_place: np.ndarray
    nats: float = 0.0
    targets: int = 0
    text_bytes: int = 0

    def add(
        self,
        model: Llama,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        sizes: np.ndarray | None = None,
    ) -> None:
        """Add the losses of labels [B, T].

        Args:
            hidden: what the head reads, [B, T, hidden_size].
            sizes: bytes of text that each label stands for, [B, T] or [T]; None: the sums by place
                are left as they are.
        """
        chunks = zip(
            hidden.flatten(0, 1).split(CHUNK),
            labels.flatten().split(CHUNK),
            strict=True,
        )
        losses = [
            F.cross_entropy(
                model.logits(chunk).float(),
                of_chunk,
                ignore_index=IGNORE_INDEX,
                reduction="none",
            )
            for chunk, of_chunk in chunks
        ]
        nats = torch.cat(losses).view(labels.shape).double().cpu().numpy()
        counted = (labels != IGNORE_INDEX).cpu().numpy()
        self.nats += float(nats.sum())
        self.targets += int(counted.sum())
        if sizes is not None:
            self.by_place[:, : nats.shape[1]] += [
                nats.sum(axis=0),
                counted.sum(axis=0),
                (sizes * counted).sum(axis=0),
            ]

    def results(self, part: int | None) -> TextLoss:
        """Loss in nats per token, perplexity, bits per byte.

        Args:
            part: tokens of a part of a sequence, for those of each part too; None: only the whole.

        Raises:
            DataError: nothing was measured.
        """
        if not self.targets:
            raise DataError("the text has no tokens to predict; use a longer text.")
        loss = self.nats / self.targets
        by_part = bits_by_part = None
        if part:
            nats, counts, size = (
                np.add.reduceat(row, range(0, len(row), part)) for row in self.by_place
            )
            by_part = _quotients(nats, counts)
            bits_by_part = _quotients(nats / math.log(2), size)
        return TextLoss(
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),
            bits_per_byte=self.nats / math.log(2) / max(1, self.text_bytes),
            tokens=self.targets,
            bytes=self.text_bytes,
            loss_by_part=by_part,
            bits_per_byte_by_part=bits_by_part,
            part=part,
            length=None if part is None else self.by_place.shape[1],
        )


def part_of(model: Llama, length: int) -> int:
    """Tokens of one part of a row: a segment, or an eighth."""
    local = model.config.attention != "softmax"
    return (
        min(length, model.config.segment_length)
        if local
        else max(1, -(-length // PLACES))
    )


@torch.inference_mode()
def over_rows(
    model: Llama,
    reader: TokenReader,
    sequences: int | None,
    isolate: bool,
) -> Measured:
    """Sums over rows of a split, each read as in training; bytes are those of the targets.

    Args:
        sequences: number of `representative_rows`; None: all rows.
        isolate: whether tokens see no other document, as in training.
    """
    count = len(reader) if sequences is None else min(sequences, len(reader))
    chosen = representative_rows(reader, count)
    total = Measured(by_place=np.zeros((3, reader.sequence_length)))
    size = max(1, min(BATCH, PIECE // reader.sequence_length))
    for start in range(0, count, size):
        rows = chosen[start : start + size]
        tokens = reader.gather(rows)
        mask = reader.targets(rows)
        documents = reader.documents(rows) if isolate else None
        batch = to_batch(tokens, mask, model.lm_head.weight.device, documents)
        hidden = model.hidden(batch.inputs, batch.documents)
        total.add(model, hidden, batch.labels, reader.text_bytes(rows))
        _report(start + len(rows), count, "rows")
    total.text_bytes = int(total.by_place[2].sum())
    return total


def over_documents(model: Llama, reader: TokenReader) -> Measured:
    """Sums over the documents of a split, each streamed by itself; see `streamed`.

    Each follows an end-of-text token, so that its first token has a target, too.

    Raises:
        ConfigError: as `streamed`.
    """
    stream = reader.stream
    total = Measured(by_place=np.zeros((3, reader.sequence_length)))
    for first, last in pairwise(stream.document_offsets().tolist()):
        tokens = np.empty(last - first, dtype=stream.dtype)
        stream.copy(first, tokens)
        counts = stream.targets(first, len(tokens))
        ids = np.concatenate(([reader.padding], tokens.astype(np.int64)))
        total.text_bytes += int(stream.text_bytes(first, len(tokens))[counts].sum())
        streamed(model, ids, counts, total)
    return total


@torch.inference_mode()
def streamed(
    model: Llama,
    ids: np.ndarray,
    counts: np.ndarray,
    total: Measured,
) -> None:
    """Add a text read as one, however long it is, in the constant state of Infini-attention.

    Args:
        ids: int64 [tokens + 1].
        counts: whether each token but the first is a target, bool [tokens].

    Raises:
        ConfigError: the model's state would grow with the text.
    """
    if model.config.attention == "softmax":
        raise ConfigError(
            "--stream reads a text of any length in constant state, "
            "which model.attention=softmax does not support; remove --stream."
        )
    device = model.lm_head.weight.device
    states = model.new_states(1, capacity=0)
    labels = np.where(counts, ids[1:], IGNORE_INDEX)
    for start in range(0, len(labels), PIECE):
        inputs = torch.tensor(ids[None, start : start + PIECE], device=device)
        inputs = inputs[:, : len(labels) - start]
        targets = torch.tensor(labels[None, start : start + PIECE], device=device)
        total.add(model, model.read(inputs, states), targets)
        _report(min(start + PIECE, len(labels)), len(labels), "tokens")


def _quotients(sums: np.ndarray, counts: np.ndarray) -> tuple[float | None, ...]:
    return tuple(
        float(value / count) if count else None
        for value, count in zip(sums, counts, strict=True)
    )


def _report(done: int, total: int, unit: str) -> None:
    log.debug("reading", extra={"progress": Reached(done, total, unit)})
