"""The compressive memory of Infini-attention.

It is that of Munkhdalai et al. 2024, arXiv 2404.07143, section 3.1. Symbols are the paper's:
sigma(x) = ELU(x) + 1; M, z what past segments have written. Queries and keys carry no rotary
positions. Everything is computed in fp32 at least, whatever the inputs' type; callers switch
autocast off around it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportConstantRedefinition=false
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from infini_llama.model.config import MemoryUpdate

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scan(A: torch.Tensor, B: torch.Tensor, product: Product) -> torch.Tensor:
    """Every x_s = product(A_s, x_(s-1)) + B_s, from x_(-1) = 0, in 2 log2(S) parallel steps.

    After Blelloch 1990, "Prefix sums and their applications", section 1.4. Neighbours are joined,
    x_(2i+1) = (A A') x_(2i-1) + (A B' + B), which is the same problem of half the length; the
    others follow from it in one step.

    Args:
        A: [b, S, …], and B: [b, S, …], such that product(A, A) and product(A, B) are defined
            segment by segment.
        product: torch.mul or torch.matmul.

    Returns:
        x, of the shape of B.
    """
    length = B.shape[1]
    if length == 1:
        return B
    A_even = A[:, 0::2]
    A_odd = A[:, 1::2]
    B_even = B[:, 0::2]
    B_odd = B[:, 1::2]
    pairs = length // 2
    odd = scan(
        product(A_odd, A_even[:, :pairs]),
        product(A_odd, B_even[:, :pairs]) + B_odd,
        product,
    )
    even = torch.cat(
        (
            B_even[:, :1],
            product(A_even[:, 1:], odd[:, : A_even.shape[1] - 1]) + B_even[:, 1:],
        ),
        dim=1,
    )
    together = torch.stack((even[:, :pairs], odd), dim=2).flatten(1, 2)
    return torch.cat((together, even[:, pairs:]), dim=1) if length % 2 else together


# sigma(q) z sums positive terms: only a memory that hardly anything was written to, or a query far
# below 0, comes below this.
SMALLEST_DENOMINATOR = 1e-6


class Memory(NamedTuple):
    """M [..., Hkv, d, d] and z [..., Hkv, d]."""

    M: torch.Tensor
    z: torch.Tensor


def sigma(x: torch.Tensor) -> torch.Tensor:
    """The feature map ELU(x) + 1, never negative, in fp32 at least."""
    features: Any = _Sigma.apply(x.to(torch.promote_types(x.dtype, torch.float32)))
    return features


class _Sigma(torch.autograd.Function):
    """ELU(x) + 1 as x + 1 above 0 and exp(x) below.

    Adding 1 to exp(x) - 1 leaves no digit of exp(-17) in fp32.

    The derivative is min(sigma(x), 1), so that the result is all the backward pass needs, and no
    exp(x) of a large x is multiplied by 0.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        features = torch.where(x > 0, x + 1, x.exp())
        ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        (features,) = ctx.saved_tensors
        return grad_outputs[0] * features.clamp(max=1)


def memories(
    k: torch.Tensor,
    v: torch.Tensor,
    update: MemoryUpdate,
    before: Memory | None = None,
    keeps: torch.Tensor | None = None,
    writes: torch.Tensor | None = None,
) -> Memory:
    """The memory after each segment.

    linear, eq. 8:  M_s = M_(s-1) + sigma(K)^T V,  z_s = z_(s-1) + sum of sigma(K) over the tokens.
    delta, eq. 9:   M_s = M_(s-1) + sigma(K)^T (V - sigma(K) M_(s-1) / (sigma(K) z_(s-1))),  z_s as
        before. All tokens of a segment subtract what the same M_(s-1) holds, so that
        M_s = A M_(s-1) + B with A = I - sigma(K)^T (sigma(K) / sigma(K) z).
    delta_bounded:  the same with z_s in A's denominator. By z_(s-1) a segment with more key mass
        than all before it makes the eigenvalues of A exceed 1 in size; by z_s they never do
        (Perron-Frobenius: the rows of sigma(K)^T sigma(K) z / (sigma(K) z) sum up to at most z).

    Args:
        k, v: [B, S, Hkv, N, d].
        before: the memory that the first segment finds, [B, …]; None: none.
        keeps: [B, S], False where a segment starts anew and what was before is dropped; None: it
            never does.
        writes: [B, S, N], False for tokens that are not written; None: all are.

    Returns:
        [B, S, …], in fp32 at least.
    """
    features, M, z = of_segments(k, v, writes)
    M_before = None if before is None else before.M
    z_before = None if before is None else before.z
    z_after = running_sums(z, z_before, keeps)
    if update == "linear":
        return Memory(running_sums(M, M_before, keeps), z_after)
    A = delta_factors(features, z_after, z_before, update, keeps)
    if M_before is not None:
        first = A[:, :1] @ M_before[:, None] + M[:, :1]
        M = torch.cat((first, M[:, 1:]), dim=1)
    # The first has no other before it.
    A = torch.cat((torch.zeros_like(A[:, :1]), A[:, 1:]), dim=1)
    return Memory(scan(A, M, torch.matmul), z_after)


def of_segments(
    k: torch.Tensor,
    v: torch.Tensor,
    writes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sigma(K) [B, S, Hkv, N, d], and each segment's sigma(K)^T V and sum of sigma(K).

    sigma(K) is zero where nothing is written.
    """
    features = sigma(k)
    if writes is not None:
        features = features * writes[:, :, None, :, None]
    return (
        features,
        features.transpose(-1, -2) @ v.to(features.dtype),
        features.sum(dim=-2),
    )


def delta_factors(
    features: torch.Tensor,
    z_after: torch.Tensor,
    z_before: torch.Tensor | None,
    update: MemoryUpdate,
    keeps: torch.Tensor | None,
) -> torch.Tensor:
    """A [B, S, Hkv, d, d] of the delta updates, zero where a segment starts anew.

    Args:
        features: of `of_segments`.
        z_after: after each segment [B, S, Hkv, d].
        z_before: what the first of them finds [B, Hkv, d].
    """
    anew = torch.zeros_like(z_after[:, :1]) if z_before is None else z_before[:, None]
    z_read = (
        z_after
        if update == "delta_bounded"
        else torch.cat((anew, z_after[:, :-1]), dim=1)
    )
    shares = features / (features @ z_read[..., None]).clamp_min(SMALLEST_DENOMINATOR)
    identity = torch.eye(features.shape[-1], dtype=z_after.dtype, device=z_after.device)
    A = identity - features.transpose(-1, -2) @ shares
    return A if keeps is None else torch.where(keeps[:, :, None, None, None], A, 0.0)


def running_sums(
    added: torch.Tensor,
    before: torch.Tensor | None,
    keeps: torch.Tensor | None,
) -> torch.Tensor:
    """Running sums [B, S, …] over segments, on top of `before` [B, …].

    They begin anew where a segment does not keep.
    """
    if keeps is None:
        total = added.cumsum(dim=1)
        return total if before is None else total + before[:, None]
    kept = keeps.to(added.dtype).view(*keeps.shape, *(1 for _ in added.shape[2:]))
    if before is not None:
        first = added[:, :1] + kept[:, :1] * before[:, None]
        added = torch.cat((first, added[:, 1:]), dim=1)
    return scan(kept, added, torch.mul)


def retrieve(q: torch.Tensor, M: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Retrieve from a memory, eq. 7: sigma(Q) M / (sigma(Q) z).

    Args:
        q: [..., H, N, d].
        M: [..., Hkv, d, d]; z: [..., Hkv, d]. Query head h reads memory h // (H / Hkv), the head
            order of SDPA.

    Returns:
        [..., H, N, d] in the type of M.
    """
    *outer, heads, length, size = q.shape
    kv_heads = M.shape[-3]
    # Query heads that share a memory become more rows of one product, so M is never repeated.
    features = sigma(q.reshape(*outer, kv_heads, heads // kv_heads * length, size))
    denominator = (features @ z[..., None]).clamp_min(SMALLEST_DENOMINATOR)
    return (features @ M / denominator).reshape(*outer, heads, length, size)


def mix(
    local: torch.Tensor,
    retrieved: torch.Tensor,
    gate: torch.Tensor,
    reads: torch.Tensor | None,
) -> torch.Tensor:
    """sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot, eq. 10.

    Args:
        local: A_dot [..., H, N, d]; retrieved: A_mem, the same shape.
        gate: beta [H].
        reads: [..., N], False where there is nothing to read; such tokens keep A_dot as it is.

    Returns:
        [..., H, N, d] in the type of `local`.
    """
    share = gate.sigmoid()[:, None, None].to(retrieved.dtype)
    if reads is not None:
        share = torch.where(reads[..., None, :, None], share, 0.0)
    return torch.lerp(local.to(retrieved.dtype), retrieved, share).to(local.dtype)
