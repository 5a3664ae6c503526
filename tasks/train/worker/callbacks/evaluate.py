"""Validation loss over a fixed set of held-out rows, the same at every world size."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.train.worker.data.loader import to_batch
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


@dataclass(frozen=True)
class Validation:
    """loss in nats a token; bits_per_byte over the UTF-8 bytes of the same targets, comparable between tokenizers."""

    loss: float
    bits_per_byte: float
    tokens: int


def rows_with(reader: TokenReader, tokens: int) -> int:
    """How many of the first rows have `tokens` targets between them; all of them where they have fewer."""
    low, high = 1, len(reader)
    while low < high:
        middle = (low + high) // 2
        if reader.count_targets(np.arange(middle)) < tokens:
            low = middle + 1
        else:
            high = middle
    return high


def evaluate(
    module: nn.Module,
    reader: TokenReader,
    token_bytes: np.ndarray,
    sequences: int,
    micro_batch: int,
    ranks: Ranks,
    autocast: torch.autocast,
    isolate: bool = False,
) -> Validation:
    """Mean over the targets of the first `sequences` validation rows; group r of ranks takes rows r, r + groups, …

    All ranks make the same number of forward passes, as sharded parameters need all of them; one that has run out of rows computes
    one that does not count. `isolate` keeps the documents of a row apart, as training does.
    """
    sequences = min(sequences, len(reader))
    rows = np.arange(ranks.group, sequences, ranks.groups, dtype=np.int64)
    most = -(-sequences // ranks.groups)
    bytes_of = torch.from_numpy(token_bytes)
    loss_sum, target_bytes, targets = 0.0, 0, 0
    module.eval()
    with torch.no_grad():
        for start in range(0, most, micro_batch):
            chosen = rows[start : start + micro_batch]
            counts = len(chosen) > 0
            chosen = chosen if counts else np.zeros(1, dtype=np.int64)
            tokens, mask = reader.gather(chosen), reader.targets(chosen)
            batch = to_batch(tokens, mask, ranks.device, reader.documents(chosen) if isolate else None)
            with autocast:
                loss = module(*batch).item()
            if counts:
                loss_sum += loss
            if counts and ranks.counts_rows:
                counted = tokens[:, 1:] if mask is None else tokens[:, 1:][mask]
                target_bytes += int(bytes_of[torch.from_numpy(counted)].sum())
                targets += counted.size
    module.train()
    loss_sum, total_bytes, total_targets = ranks.sum(loss_sum, target_bytes, targets)
    return Validation(
        loss_sum / max(1.0, total_targets), loss_sum / math.log(2) / max(1.0, total_bytes), int(total_targets)
    )
