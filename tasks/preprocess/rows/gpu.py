"""Rows computed by torch on a GPU, with the bytes of `packing.compute_rows`.

first_fit and best_fit are not computed here: the row of a piece depends on the content of all rows
at that time, one piece after another.
"""

import numpy as np
import torch

from infini_llama.configs.packing import PACKED
from infini_llama.tasks.preprocess.rows.packing import RowArrays, row_count


def compute_rows(
    lengths: np.ndarray,
    strategy: str,
    sequence_length: int,
    stride: int | None,
    device: str,
) -> RowArrays:
    """The rows of documents of these `lengths`, int64 [documents], by one of `ON_A_GPU`."""
    if strategy not in PACKED:
        count = row_count(int(lengths.sum()), sequence_length, stride)
        starts = torch.arange(count, dtype=torch.int64, device=device)
        starts.mul_(stride or sequence_length)
        return RowArrays(starts.cpu().numpy())
    pieces = pieces_of(torch.from_numpy(lengths).to(device), sequence_length)
    if strategy == "padded":
        rows = torch.arange(len(pieces) + 1, device=device)
    else:
        rows = greedy_rows(pieces[:, 1].contiguous(), sequence_length + 1)
    return RowArrays(rows.cpu().numpy(), pieces.cpu().numpy())


def pieces_of(lengths: torch.Tensor, sequence_length: int) -> torch.Tensor:
    """Pieces as `packing.pieces_of` gives them.

    Returns:
        int64 [pieces, 2]: first token in the stream, and number of tokens.
    """
    # Pieces of each document; 0 for a document of one token.
    counts = (lengths - 1 + sequence_length - 1) // sequence_length
    earlier_pieces = counts.cumsum(0) - counts
    number = torch.arange(int(counts.sum()), device=lengths.device)
    number -= earlier_pieces.repeat_interleave(counts)  # of a piece in its document
    skipped = number * sequence_length
    document_starts = lengths.cumsum(0) - lengths
    starts = document_starts.repeat_interleave(counts) + skipped
    left = lengths.repeat_interleave(counts) - skipped
    sizes = left.clamp(max=sequence_length + 1)
    return torch.stack((starts, sizes), dim=1)


def greedy_rows(sizes: torch.Tensor, capacity: int) -> torch.Tensor:
    """The pieces that begin rows of next fit.

    Each piece points to the one that begins the next row if it begins a row itself. What the first
    one leads to is found by doubling the distance of all pointers, in log2(rows) rounds
    (Wyllie 1979, "The Complexity of Parallel Computations").

    Args:
        sizes: int64 [pieces], tokens of each.

    Returns:
        int64 [rows + 1]: numbers of these pieces, and then the number of all pieces.
    """
    count = len(sizes)
    ends = sizes.cumsum(0)
    following = torch.searchsorted(ends, ends - sizes + capacity, right=True)
    # The end points to itself.
    following = torch.cat((following, following.new_full((1,), count)))
    begins = torch.zeros_like(following, dtype=torch.bool)
    begins[0] = True
    while not begins[count]:
        begins[following[begins]] = True
        following = following[following]
    return begins.nonzero()[:, 0]
