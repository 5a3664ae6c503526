"""Rotary positions (Su et al. 2021, arXiv 2104.09864, section 3.2) in Hugging Face's layout: element i of a head turns with
element i + head_dim / 2.
"""

from typing import NamedTuple

import torch


class Rotary(NamedTuple):
    """Cosines and sines [T, head_dim] of T positions, shared by all layers of one forward pass."""

    cos: torch.Tensor
    sin: torch.Tensor

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., T, head_dim] turned by its positions' angles, rounded to the type of x once."""
        first, second = x.chunk(2, dim=-1)
        return (x * self.cos + torch.cat((-second, first), dim=-1) * self.sin).to(x.dtype)

    def first(self, length: int) -> "Rotary":
        """The first `length` positions."""
        return Rotary(self.cos[:length], self.sin[:length])


def rotary(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Tables of integer positions [T], in `dtype` or fp32 if that is wider."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=positions.device).to(wide) / head_dim
    angles = positions.to(wide)[:, None] * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return Rotary(angles.cos(), angles.sin())
