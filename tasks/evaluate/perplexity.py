"""Perplexity over sequences of a dataset, or over files.

Files are read in sequences, or as one stream in constant state.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.model.llama import PIECE, Llama
from infini_llama.model.loss import IGNORE_INDEX
from infini_llama.tasks.preprocess.sources.files import File
from infini_llama.tasks.preprocess.sources.patterns import NotText, matching_files
from infini_llama.tasks.preprocess.sources.texts import Unreadable
from infini_llama.tasks.preprocess.tokens.order import representative_rows
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.stream import share_bytes
from infini_llama.tasks.progress import Reached
from infini_llama.tasks.records.evaluation import TextLoss
from infini_llama.tasks.tokenizers.encoder import TextEncoder
from infini_llama.tasks.tokenizers.expressed import LARGEST_LOSS, is_too_much, losses_of
from infini_llama.tasks.train.worker.data.loader import to_batch

log = logging.getLogger("infini_llama.evaluate")
BATCH = 8  # rows
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
        logits: torch.Tensor,
        labels: torch.Tensor,
        sizes: np.ndarray | None = None,
    ) -> None:
        """Add the losses of labels [B, T].

        Args:
            sizes: bytes of text that each label stands for, [B, T] or [T]; None: the sums by place
                are left as they are.
        """
        losses = F.cross_entropy(
            logits.float().flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="none",
        )
        nats = losses.view(labels.shape).double().cpu().numpy()
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
        )


def part_of(model: Llama, length: int) -> int:
    """Tokens of one part of a row: a segment, or an eighth."""
    local = model.config.attention != "softmax"
    return min(length, model.config.segment_length) if local else max(1, -(-length // PLACES))


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
    for start in range(0, count, BATCH):
        rows = chosen[start : start + BATCH]
        tokens = reader.gather(rows)
        mask = reader.targets(rows)
        documents = reader.documents(rows) if isolate else None
        inputs, labels, *rest = to_batch(tokens, mask, model.lm_head.weight.device, documents)
        total.add(model(inputs, *rest), labels, reader.text_bytes(rows))
        _report(start + len(rows), count, "rows")
    total.text_bytes = int(total.by_place[2].sum())
    return total


@torch.inference_mode()
def over_text(model: Llama, ids: list[int], sizes: np.ndarray, total: Measured) -> None:
    """Add a text in rows that do not see one another.

    Its first token is the end of the text before it. Every token but the first is predicted once,
    so the bits per byte are those of the whole text.

    Args:
        sizes: bytes of text of each token but the first, int64 [len(ids) - 1].
    """
    length = total.by_place.shape[1]
    for start in range(0, len(ids) - 1, length):
        tokens = ids[start : start + length + 1]
        row = torch.tensor([tokens], device=model.lm_head.weight.device)
        total.add(model(row[:, :-1]), row[:, 1:], sizes[start : start + length])


@torch.inference_mode()
def streamed(model: Llama, ids: list[int], total: Measured) -> None:
    """Add the same text read as one, however long it is, in the constant state of Infini-attention.

    Raises:
        ConfigError: the model's state would grow with the text.
    """
    if model.config.attention == "softmax":
        raise ConfigError(
            "--stream reads a text of any length in constant state, "
            "which model.attention=softmax does not support; remove --stream."
        )
    states = model.new_states(1, capacity=0)
    for start in range(0, len(ids) - 1, PIECE):
        piece = torch.tensor([ids[start : start + PIECE + 1]], device=model.lm_head.weight.device)
        total.add(model.logits(model.read(piece[:, :-1], states)), piece[:, 1:])
        _report(min(start + PIECE, len(ids) - 1), len(ids) - 1, "tokens")


def texts_of(files: list[str], text_column: str, home: Path) -> Iterator[str]:
    """Every text in these files, in the forms that data.files has.

    The files of this program are left out.

    Args:
        home: the folder of runs and datasets.

    Raises:
        DataError: nothing matches, a file cannot be read, or a record is damaged.
    """
    for path, name in matching_files(files, "--files", "auto", NotText(home)):
        source = File(path, name, text_column, "--files")
        try:
            yield from filter(None, source.texts())
        except Unreadable as fault:
            raise DataError(f"{source} {fault}; repair it or remove it.") from None


def over_texts(
    model: Llama,
    encoder: TextEncoder,
    token_bytes: np.ndarray,
    end_of_text: int,
    texts: Sequence[str],
    length: int,
    stream: bool,
) -> Measured:
    """Sums over all of `texts`, each by itself: streamed, or in rows of `length` tokens.

    They are encoded as by preprocess.

    Raises:
        DataError: the tokenizer fails, or has no token for too much of the texts.
    """
    total = Measured(by_place=np.zeros((3, length)))
    _refuse_unknown_text(encoder, texts)
    for text in texts:
        ids = [end_of_text, *encoder.encode(text)]
        size = len(text.encode())
        total.text_bytes += size
        if stream:
            streamed(model, ids, total)
        else:
            widths = token_bytes[ids[1:]].astype(np.int64)
            sizes = share_bytes(widths, np.array([0, len(widths)]), np.array([size]))
            over_text(model, ids, sizes, total)
    return total


def _refuse_unknown_text(encoder: TextEncoder, texts: Sequence[str]) -> None:
    """Refuse texts of which the tokenizer has no token for too much.

    Raises:
        DataError: with the share that would be lost.
    """
    losses = losses_of(encoder.tokenizer, encoder.split_special_tokens)
    if not losses:
        return
    unknown = lost = size = 0
    for text in texts:
        unknown_here, lost_here, size_here = losses.of(text)
        unknown += unknown_here
        lost += lost_here
        size += size_here
    if is_too_much(lost, size):
        raise DataError(
            f"--files: the run's tokenizer has no token for {100 * lost / size:.3g} % of the text "
            f"({unknown:,} unknown tokens); at most {LARGEST_LOSS:.0%} may be lost; "
            "give other files."
        )


def _quotients(sums: np.ndarray, counts: np.ndarray) -> tuple[float | None, ...]:
    return tuple(
        float(value / count) if count else None for value, count in zip(sums, counts, strict=True)
    )


def _report(done: int, total: int, unit: str) -> None:
    log.debug("reading", extra={"progress": Reached(done, total, unit)})
