"""The row table by torch, on any device: `python -m tasks.preprocess.chunking_torch DEVICE TOKENS LENGTH` writes it to stdout."""

import sys

import torch


def row_starts(tokens: int, sequence_length: int, device: str) -> torch.Tensor:
    """The same as `chunking.row_starts`: int64 [rows], on `device`."""
    return torch.arange((tokens - 1) // sequence_length, dtype=torch.int64, device=device) * sequence_length


if __name__ == "__main__":
    rows = row_starts(int(sys.argv[2]), int(sys.argv[3]), sys.argv[1])
    sys.stdout.buffer.write(rows.cpu().numpy().data)
