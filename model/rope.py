"""Rotary positions (Su et al. 2021, arXiv 2104.09864), in Hugging Face's layout: the two halves of a head are rotated together."""

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]


def rotary_tables(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Cosines and sines [T, head_dim] for integer positions [T], computed in fp32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=positions.device).to(wide) / head_dim
    angles = positions.to(wide)[:, None] * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """x [..., T, head_dim] with each pair (x[i], x[i + head_dim/2]) turned by its position's angle, in the type of x."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
