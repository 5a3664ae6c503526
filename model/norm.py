"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

import torch
import torch.nn.functional as F
from torch import nn

from infini_llama.model.split import Split, here


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) for x [..., size]; the mean and the root in fp32 at least.

    `of_heads`: x is of heads, of which ranks that share a model have some each; else every rank has all of x.
    """

    split: Split | None = None

    def __init__(self, size: int, eps: float, of_heads: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.of_heads = eps, of_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight = here(self.weight, self.split)
        if self.split is not None and self.of_heads:
            weight = self.split.spread(weight)
        return F.rms_norm(wide, x.shape[-1:], eps=self.eps).to(x.dtype) * weight
