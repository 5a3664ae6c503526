"""Row starts by torch, on any device: `python -m MODULE DEVICE FIRST LAST STEP` writes them to stdout."""

import sys
from collections.abc import Iterator

import torch

ON_CPU = 1 << 22  # rows at a time
SHARE = 0.25  # of a GPU's free memory, for a row's number and its product
BYTES = 16  # of both


def rows_at_once(device: str) -> int:
    """As many as the free memory of the device holds with room for others."""
    if torch.device(device).type != "cuda":
        return ON_CPU
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, int(free * SHARE) // BYTES)


def row_starts(first: int, last: int, step: int, device: str) -> Iterator[torch.Tensor]:
    """The rows first … last-1 of `chunking.row_starts`: int64 on `device`, some at a time."""
    size = rows_at_once(device)
    for begin in range(first, last, size):
        yield torch.arange(begin, min(begin + size, last), dtype=torch.int64, device=device) * step


if __name__ == "__main__":
    torch.empty(0, device=sys.argv[1])  # a device that does not work says so, also where it has no row to compute
    for rows in row_starts(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[1]):
        sys.stdout.buffer.write(rows.cpu().numpy().data)
