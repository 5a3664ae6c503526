"""Floating-point operations as PyTorch counts them while they are executed."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from infini_llama.model import loss

aten = torch.ops.aten


def _in_chunks(*arguments: Any, **_: Any) -> int:
    """Those of the loss in chunks, which is one operator to the counter."""
    with FlopCounterMode(
        display=False, custom_mapping={aten.addmm_: _addmm_}
    ) as counter:
        loss.in_chunks(*arguments)
    return counter.get_total_flops()


def _addmm_(shape: Any, a: tuple[int, int], b: tuple[int, int], **_: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


_in_chunks._get_raw = True  # the counter passes tensors, not their shapes
CHUNKED_LOSS = getattr(torch.ops, loss.__name__.replace(".", "_")).chunked_cross_entropy


def flop_counter() -> FlopCounterMode:
    """A context that counts products, also those of the loss in chunks."""
    return FlopCounterMode(display=False, custom_mapping={CHUNKED_LOSS: _in_chunks})


def counted(counter: FlopCounterMode) -> int:
    """All products but those inside SDPA, which PyTorch counts as if they were not causal."""
    return sum(
        n
        for operator, n in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(operator)
    )
