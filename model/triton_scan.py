"""The recurrence of `scan.scan` in one pass over the segments, by Triton; imported only where a GPU and Triton are there.

Bytes, for a row of S segments and one layer with K key-value heads of size d, in fp32. The state is M, 4 K d^2 bytes: 131 kB at
K = 8, d = 64. Each B_s is read once and each x_s written once, 8 K d^2 bytes per segment; the delta rule reads A_s, another 4 K d^2.
At 32,768 tokens in segments of 2,048 (S = 16) that is 4.2 MB per layer forward, 6.3 MB with the delta rule: 1.4 and 2.1
microseconds at 3 TB/s, so the launch, and for the delta rule the S products that follow each other, cost more than memory. The
plain path moves each B_s about ten times, in 2 log2(S) steps of several kernels each. Backward is the same recurrence in reverse with
A^T, and writes the gradient of A as well. These are counts, not measurements: benchmarks/gpu/run.py --part infini measures.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportConstantRedefinition=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

BLOCK = 1024  # elements of the state in a program, where they do not mix
WIDTH = 16  # columns of the state in a program, where they do: tl.dot's smallest
SIZES = (16, 32, 64, 128)  # of A


@triton.jit
def _scaled_kernel(
    factors: Any, added: Any, out: Any, segments: Any, size: Any, REVERSE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """x_s = factors_s x_(s-1) + added_s, a scalar factor per row and segment; in reverse x_s = factors_(s+1) x_(s+1) + added_s."""
    row = tl.program_id(0)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    state = tl.zeros((BLOCK,), tl.float32)
    for step in range(segments):
        segment = row * segments + (segments - 1 - step if REVERSE else step)
        factor = tl.load(factors + segment + (1 if REVERSE else 0), mask=step > 0, other=0.0)
        start = segment.to(tl.int64) * size
        state = state * factor + tl.load(added + start + places, mask=inside, other=0.0)
        tl.store(out + start + places, state, mask=inside)


@triton.jit
def _affine_kernel(
    A: Any,
    B: Any,
    out: Any,
    segments: Any,
    heads: Any,
    columns: Any,
    REVERSE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """x_s = A_s x_(s-1) + B_s per row and head, WIDTH columns of x in a program; in reverse x_s = A_(s+1)^T x_(s+1) + B_s."""
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    lines = tl.arange(0, SIZE)
    own = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (lines[:, None] >= 0) & (own[None, :] < columns)
    state = tl.zeros((SIZE, WIDTH), tl.float32)
    for step in range(segments):
        segment = (row * segments + (segments - 1 - step if REVERSE else step)) * heads + head
        if REVERSE:
            matrix = A + (segment + heads).to(tl.int64) * SIZE * SIZE + lines[None, :] * SIZE + lines[:, None]
        else:
            matrix = A + segment.to(tl.int64) * SIZE * SIZE + lines[:, None] * SIZE + lines[None, :]
        factor = tl.load(matrix, mask=(lines[:, None] >= 0) & (lines[None, :] >= 0) & (step > 0), other=0.0)
        places = segment.to(tl.int64) * SIZE * columns + lines[:, None] * columns + own[None, :]
        state = tl.dot(factor, state, input_precision="ieee") + tl.load(B + places, mask=inside, other=0.0)
        tl.store(out + places, state, mask=inside)


# Their launch, kernel[grid](arguments), is a notation of Triton's own.
SCALED: Any = _scaled_kernel
AFFINE: Any = _affine_kernel


def _launch(A: torch.Tensor, B: torch.Tensor, matrices: bool, reverse: bool) -> torch.Tensor:
    out = torch.empty_like(B)
    batch, segments = B.shape[:2]
    if not matrices:
        size = B[0, 0].numel()
        SCALED[(batch, triton.cdiv(size, BLOCK))](A, B, out, segments, size, REVERSE=reverse, BLOCK=BLOCK)
        return out
    heads, size, columns = B.shape[2:]
    grid = (batch * heads, triton.cdiv(columns, WIDTH))
    AFFINE[grid](A, B, out, segments, heads, columns, REVERSE=reverse, SIZE=size, WIDTH=WIDTH)
    return out


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: torch.Tensor, B: torch.Tensor, matrices: bool) -> torch.Tensor:
        A, B = A.contiguous(), B.contiguous()
        x = _launch(A, B, matrices, reverse=False)
        ctx.matrices = matrices
        ctx.save_for_backward(A, x)
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        A, x = ctx.saved_tensors
        grad_B = _launch(A, grad_outputs[0].contiguous(), ctx.matrices, reverse=True)
        if not ctx.needs_input_grad[0]:
            return None, grad_B, None
        grad_A = torch.zeros_like(A)  # the first segment's factor multiplies nothing
        grad_A[:, 1:] = grad_B[:, 1:] @ x[:, :-1].transpose(-1, -2)
        return grad_A, grad_B, None


def fits(A: torch.Tensor, B: torch.Tensor, matrices: bool) -> bool:
    """Whether the kernels compute this recurrence: fp32, and factors that are scalars per segment, or matrices of one of SIZES."""
    if A.dtype != torch.float32 or B.dtype != torch.float32:
        return False
    if not matrices:
        return A.numel() == B.shape[0] * B.shape[1] and not A.requires_grad
    return A.ndim == B.ndim == 5 and A.shape[-1] in SIZES and A.shape[:-1] == B.shape[:-1]


def scan(A: torch.Tensor, B: torch.Tensor, matrices: bool) -> torch.Tensor:
    """Every x_s = A_s x_(s-1) + B_s, from x_(-1) = 0; see `model.scan.scan`, whose `product` is torch.matmul with `matrices`."""
    result: Any = _Scan.apply(A, B, matrices)
    return result
