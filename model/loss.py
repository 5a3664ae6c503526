"""Cross-entropy of the next token."""

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over targets of -log p(label), in fp32 at least, and their number.

    A sum, not a mean: the mean over a whole step's tokens is taken once, so that it does not depend on how the step is split.

    Args:
        logits: [B, T, V].
        labels: [B, T] int64; IGNORE_INDEX is no target.

    Returns:
        the sum (scalar, nats) and the number of targets (scalar int64).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total, (labels != IGNORE_INDEX).sum()
