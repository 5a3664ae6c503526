"""Recurrences x_s = A_s x_(s-1) + B_s over a row's segments, all of them at once."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportConstantRedefinition=false
import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TOLERANCE = 1e-4  # of the norm of the plain path's result: what another order of sums explains in fp32
log = logging.getLogger("infini_llama.model")


def scan(A: torch.Tensor, B: torch.Tensor, product: Product) -> torch.Tensor:
    """Every x_s = product(A_s, x_(s-1)) + B_s, from x_(-1) = 0: on a GPU by the kernel of `model.triton_scan` if it works there.

    Args:
        A: [b, S, …], and B: [b, S, …], such that product(A, A) and product(A, B) are defined segment by segment.
        product: torch.mul or torch.matmul.

    Returns:
        x, of the shape of B.
    """
    if B.device.type == "cuda" and not torch.compiler.is_compiling() and B.shape[1] > 1:
        kernel, matrices = kernel_on(B.device), product is torch.matmul
        if kernel is not None and kernel.fits(A, B, matrices):
            return kernel.scan(A, B, matrices)
    return plain_scan(A, B, product)


@cache
def kernel_on(device: torch.device) -> ModuleType | None:
    """The module of the kernel, once it agreed with `plain_scan` on this device; None, with the reason in the log, if it does not."""
    try:
        kernel = import_module("infini_llama.model.triton_scan")
        difference = disagreement(kernel, device)
    except Exception as error:  # Triton is not there, or has no compiler or no support for this GPU
        log.info("memory scan by torch: the Triton kernel cannot be used (%s: %s)", type(error).__name__, error)
        return None
    if not difference <= TOLERANCE:
        log.warning("memory scan by torch: the Triton kernel differs from it by %.2g", difference)
        return None
    log.info("memory scan by the Triton kernel, which agrees with torch")
    return kernel


@torch.enable_grad()
def disagreement(kernel: ModuleType, device: torch.device) -> float:
    """Largest relative difference of results and gradients from `plain_scan`, for factors that are scalars and matrices."""
    worst = 0.0
    for matrices in (False, True):
        generator = torch.Generator(device).manual_seed(0)
        shape = (2, 5, 2, 64, 64)
        B, weights = (torch.randn(shape, device=device, generator=generator) for _ in range(2))
        A = torch.randn(shape, device=device, generator=generator) / 16
        if not matrices:
            A = (A[..., :1, :1, :1] > 0).float()
        inputs = [A.requires_grad_(matrices), B.requires_grad_()]
        needed = inputs if matrices else inputs[1:]
        results: list[list[torch.Tensor]] = []
        for x in (plain_scan(A, B, torch.matmul if matrices else torch.mul), kernel.scan(A, B, matrices)):
            results.append([x.detach(), *torch.autograd.grad((x * weights).sum(), needed)])
        for found, expected in zip(results[1], results[0], strict=True):
            worst = max(worst, float((found - expected).norm() / expected.norm()))
    return worst


def plain_scan(A: torch.Tensor, B: torch.Tensor, product: Product) -> torch.Tensor:
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
    odd = plain_scan(product(A_odd, A_even[:, :pairs]), product(A_odd, B_even[:, :pairs]) + B_odd, product)
    even = torch.cat((B_even[:, :1], product(A_even[:, 1:], odd[:, : A_even.shape[1] - 1]) + B_even[:, 1:]), dim=1)
    together = torch.stack((even[:, :pairs], odd), dim=2).flatten(1, 2)
    return torch.cat((together, even[:, pairs:]), dim=1) if length % 2 else together
