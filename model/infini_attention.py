"""The compressive memory of Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143), linear update, all segments at once.

Symbols as in the paper, section 3.1: sigma(x) = ELU(x) + 1; M_s, z_s the memory after segment s; a segment reads M_{s-1}
before it writes. Queries and keys come without rotary positions. Everything here is in fp32 at least, outside autocast.
"""

import torch
import torch.nn.functional as F

# A denominator sigma(q) z is a sum of positive terms, zero only where nothing was written.
SMALLEST = 1e-6


def sigma(x: torch.Tensor) -> torch.Tensor:
    """The memory's feature map ELU(x) + 1, positive everywhere, in fp32 at least."""
    return F.elu(x.to(torch.promote_types(x.dtype, torch.float32))) + 1


def written(k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What keys and values add to a memory, eq. 8.

    Args:
        k: [..., N, d], not rotated.
        v: [..., N, d].
        mask: broadcastable to [..., N]; 0 where a token is padding and must leave no trace.

    Returns:
        sigma(K)^T V [..., d, d] and the sum of sigma(K) over tokens [..., d].
    """
    features = sigma(k)
    if mask is not None:
        features = features * mask[..., None]
    return features.transpose(-1, -2) @ v.to(features.dtype), features.sum(dim=-2)


def read(q: torch.Tensor, M: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """What queries find in a memory, eq. 7: sigma(Q) M / (sigma(Q) z).

    Args:
        q: [..., H, N, d], not rotated.
        M: [..., Hkv, d, d] and z: [..., Hkv, d]; H is a multiple of Hkv, query head h reads memory h // (H / Hkv).

    Returns:
        [..., H, N, d] in the memory's type; zero where the memory is empty.
    """
    *outer, heads, length, size = q.shape
    groups = heads // M.shape[-3]
    # The query heads that share a memory become more rows of one product: M is never repeated.
    features = sigma(q).reshape(*outer, M.shape[-3], groups * length, size)
    found = (features @ M) / (features @ z[..., None]).clamp_min(SMALLEST)
    return found.reshape(*outer, heads, length, size)


def before_each(added: torch.Tensor) -> torch.Tensor:
    """Sums over the segments before each one, dim 1 of `added` [B, S, …]: the exclusive cumulative sum, zero for the first."""
    return torch.cat((torch.zeros_like(added[:, :1]), added[:, :-1].cumsum(dim=1)), dim=1)


def mix(local: torch.Tensor, memory: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """sigmoid(beta) * A_mem + (1 - sigmoid(beta)) * A_dot, eq. 10.

    Args:
        local, memory: [..., H, N, d].
        gate: beta, [H] in fp32.

    Returns:
        [..., H, N, d] in the type of `local`.
    """
    share = gate.sigmoid()[:, None, None].to(memory.dtype)
    return (share * memory + (1 - share) * local.to(memory.dtype)).to(local.dtype)
