"""The compressive memory of Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143, section 3.1).

Symbols are the paper's: sigma(x) = ELU(x) + 1; M, z what past segments have written. Queries and keys carry no rotary
positions. Everything is computed in fp32 at least, whatever the inputs' type; callers switch autocast off around it.
"""

import torch
import torch.nn.functional as F

# sigma(q) z sums positive terms, so only a memory that hardly anything was written to comes below this.
SMALLEST_DENOMINATOR = 1e-6


def sigma(x: torch.Tensor) -> torch.Tensor:
    """The feature map ELU(x) + 1, never negative."""
    return F.elu(x.to(torch.promote_types(x.dtype, torch.float32))) + 1


def written(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What tokens add to M and z, eq. 8 (the paper's "Linear" update).

    Args:
        k, v: [..., N, d].

    Returns:
        sigma(K)^T V [..., d, d], and the sum of sigma(K) over the tokens [..., d].
    """
    features = sigma(k)
    return features.transpose(-1, -2) @ v.to(features.dtype), features.sum(dim=-2)


def read(q: torch.Tensor, M: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """What queries find in a memory, eq. 7: sigma(Q) M / (sigma(Q) z).

    Args:
        q: [..., H, N, d].
        M: [..., Hkv, d, d]; z: [..., Hkv, d]. Query head h reads memory h // (H / Hkv), the head order of SDPA.

    Returns:
        [..., H, N, d] in the type of M.
    """
    *outer, heads, length, size = q.shape
    kv_heads = M.shape[-3]
    # Query heads that share a memory become more rows of one product, so M is never repeated.
    features = sigma(q.reshape(*outer, kv_heads, heads // kv_heads * length, size))
    denominator = (features @ z[..., None]).clamp_min(SMALLEST_DENOMINATOR)
    return (features @ M / denominator).reshape(*outer, heads, length, size)


def mix(local: torch.Tensor, found: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot, eq. 10.

    Args:
        local: A_dot [..., H, N, d]; found: A_mem, the same shape.
        gate: beta [H].

    Returns:
        [..., H, N, d] in the type of `local`.
    """
    share = gate.sigmoid()[:, None, None].to(found.dtype)
    return torch.lerp(local.to(found.dtype), found, share).to(local.dtype)
