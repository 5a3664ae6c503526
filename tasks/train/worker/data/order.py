"""The order of samples: a pure function of (seed, epoch, position), so that seeking costs nothing and no rank keeps state."""

import hashlib
from collections.abc import Sequence

import numpy as np

from infini_llama.tasks.records.lineage import SampleRange

ROUNDS = 6


def _round_keys(seed: int, epoch: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]


def _mix(values: np.ndarray, key: int) -> np.ndarray:
    """splitmix64's finalizer: every output bit depends on every input bit (Steele, Lea and Flood 2014)."""
    mixed = values + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Image of `positions` under a pseudo-random permutation of range(size).

    A balanced Feistel network over the next even power of two, with cycle walking for images beyond `size`
    (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). O(1) memory and O(1) seek, unlike a shuffled list.

    Args:
        positions: int64 [n], each in [0, size).
        size: number of rows, at least 1.
        seed: of the run.
        epoch: another epoch, another permutation.

    Returns:
        int64 [n], distinct for distinct positions.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    keys = _round_keys(seed, epoch)
    result = positions.astype(np.uint64)
    pending = np.arange(len(result))
    with np.errstate(over="ignore"):
        while len(pending):
            values = result[pending]
            left, right = values >> half, values & mask
            for key in keys:
                left, right = right, left ^ (_mix(right, key) & mask)
            result[pending] = (left << half) | right
            pending = pending[result[pending] >= np.uint64(size)]
    return result.astype(np.int64)


def sample_rows(first: int, count: int, size: int, seed: int) -> np.ndarray:
    """Rows of the samples numbered first, first+1, …, first+count-1 of the whole run; epochs follow each other without a gap."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    epochs, positions = np.divmod(numbers, size)
    rows = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        rows[chosen] = permute(positions[chosen], size, seed, int(epoch))
    return rows


def next_sample(samples: int, skipped: Sequence[SampleRange]) -> int:
    """The first sample from number `samples` on that is in none of the ranges that a rollback has left out."""
    for span in sorted(skipped, key=lambda span: span.first):
        if span.first <= samples < span.end:
            samples = span.end
    return samples
