"""Activation checkpointing (Chen et al. 2016, arXiv 1604.06174): less memory for a second computation in the backward pass."""

# pyright: reportUnknownVariableType=false
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Checkpointing = Literal["none", "selective", "full"]
# What is dear to compute: matrix products and attention. The rest, norms and elementwise functions, is computed again.
aten = torch.ops.aten
DEAR = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


def recomputed(
    function: Callable[..., torch.Tensor], kind: Checkpointing | Callable[..., Any], *arguments: Any
) -> torch.Tensor:
    """function(*arguments), of whose intermediate results "none" keeps all, "selective" the dear ones, "full" none.

    The generators' states are restored, so that dropout repeats itself. Another library's function, called as torch's `checkpoint`,
    can take the place of `kind`.
    """
    if kind == "none" or not torch.is_grad_enabled():
        return function(*arguments)
    if callable(kind):
        return kind(function, *arguments)
    if kind == "full":
        return checkpoint(function, *arguments, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _keep_the_dear)
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)


def _keep_the_dear(_context: Any, operation: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in DEAR else CheckpointPolicy.PREFER_RECOMPUTE
