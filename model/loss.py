"""Cross-entropy of the next token, with or without all of a batch's logits at once."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100


def cross_entropy_sum(
    logits: torch.Tensor, labels: torch.Tensor, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over targets of -log p(label), in fp32 at least, and their number.

    A sum, not a mean: the mean over a whole step's tokens is taken once, so that it does not depend on how the step is split.

    Args:
        logits: [B, T, V].
        labels: [B, T] int64; IGNORE_INDEX is no target.
        z_loss: weight of log^2 Z (Chowdhery et al. 2022, arXiv 2204.02311, section 5), which keeps logits from drifting. Its
            gradient is added; the value stays the cross-entropy, so that losses can be compared.

    Returns:
        the sum (scalar, nats) and the number of targets (scalar int64).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    targets = labels != IGNORE_INDEX
    if z_loss:
        penalty = z_loss * (wide.logsumexp(dim=-1).square() * targets).sum()
        total = total + (penalty - penalty.detach())
    return total, targets.sum()


def chunked_cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk: int,
    z_loss: float = 0.0,
    vocabulary: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cross_entropy_sum` of the logits hidden @ weight^T, of which only those of `chunk` tokens exist at a time.

    The gradient is taken chunk by chunk in the forward pass (as Hsu et al. 2024, "Liger Kernel", arXiv 2410.10989, section 3.2),
    and only scaled in the backward pass, so that no logits are computed twice.

    Args:
        hidden: [B, T, D]; weight: [V, D]; labels: [B, T] int64.
        vocabulary: tokens; further rows of `weight` pad it and have no probability. None: all V rows are tokens.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    total: Any = _Chunked.apply(hidden.flatten(0, 1).to(dtype), weight, labels.flatten(), chunk, z_loss, vocabulary)
    return total, (labels != IGNORE_INDEX).sum()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk: int,
        z_loss: float,
        vocabulary: int | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        narrow = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        learns = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if learns else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if learns else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in range(0, hidden.shape[0], chunk):
                x, label = hidden[part : part + chunk], labels[part : part + chunk]
                targets = label != IGNORE_INDEX
                label = torch.where(targets, label, 0)[:, None]
                logits = (x @ narrow.T).to(wide)
                if vocabulary is not None:
                    logits[:, vocabulary:] = -torch.inf  # at its full width, to which the products are aligned
                log_z = logits.logsumexp(dim=1, keepdim=True)
                total += ((log_z - logits.gather(1, label))[:, 0] * targets).sum()
                if grad_hidden is None or grad_weight is None:
                    continue
                gradient = logits.sub_(log_z).exp_()
                if z_loss:
                    gradient *= 1 + 2 * z_loss * log_z
                gradient.scatter_add_(1, label, torch.full_like(log_z, -1.0))
                gradient = (gradient * targets[:, None]).to(hidden.dtype)
                grad_hidden[part : part + chunk] = gradient @ narrow
                if grad_weight.dtype == gradient.dtype:
                    grad_weight.addmm_(gradient.T, x)
                else:  # sums over chunks stay in fp32
                    grad_weight += gradient.T @ x
        if learns:
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            (grad_hidden * scale).to(grad_hidden.dtype),
            (grad_weight * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
        )
