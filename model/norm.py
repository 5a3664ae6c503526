"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) for x [..., size]; the mean and the root in fp32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight
