"""Recurrences x_s = A_s x_(s-1) + B_s over a row's segments, all of them at once."""

# pyright: reportUnknownMemberType=false, reportConstantRedefinition=false
from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scan(A: torch.Tensor, B: torch.Tensor, product: Product) -> torch.Tensor:
    """Every x_s, from x_(-1) = 0, in 2 log2(S) parallel steps (Blelloch 1990, "Prefix sums and their applications", section 1.4).

    Neighbours are joined, x_(2i+1) = (A A') x_(2i-1) + (A B' + B), which is the same problem of half the length; the others
    follow from it in one step.

    Args:
        A: [b, S, …], and B: [b, S, …], such that product(A, A) and product(A, B) are defined segment by segment.
        product: torch.mul or torch.matmul.

    Returns:
        x, of the shape of B.
    """
    length = B.shape[1]
    if length == 1:
        return B
    A_even, A_odd, B_even, B_odd = A[:, 0::2], A[:, 1::2], B[:, 0::2], B[:, 1::2]
    pairs = length // 2
    odd = scan(product(A_odd, A_even[:, :pairs]), product(A_odd, B_even[:, :pairs]) + B_odd, product)
    even = torch.cat((B_even[:, :1], product(A_even[:, 1:], odd[:, : A_even.shape[1] - 1]) + B_even[:, 1:]), dim=1)
    together = torch.stack((even[:, :pairs], odd), dim=2).flatten(1, 2)
    return torch.cat((together, even[:, pairs:]), dim=1) if length % 2 else together
