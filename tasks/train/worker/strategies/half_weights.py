"""bf16 copies of the layers' matrices, made once per step, beside fp32 master weights."""

from collections.abc import Sequence

import torch
from torch import nn

from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.strategies.native import Batch, SingleRank


class HalfWeights(SingleRank):
    """One rank whose layers multiply by bf16 copies of their matrices; the parameters stay the fp32 master weights.

    Under autocast each micro-batch casts all matrices, and each gradient is cast back before it is added up. The copies are made
    once per step, and their gradients are added to those of the parameters, in fp32, as they are. Without compilation,
    the bits are the same.
    """

    copied: list[tuple[nn.Linear, nn.Parameter, nn.Parameter]]

    def _wrap(self, model: Llama, module: nn.Module) -> nn.Module:
        linear = [part for part in model.model.layers.modules() if isinstance(part, nn.Linear)]
        self.copied = [(part, part.weight, _copy_of(part.weight)) for part in linear]  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        return module

    def accumulate(self, micro_batches: Sequence[Batch], targets: int, scale: float = 1.0) -> torch.Tensor:
        for layer, master, copy in self.copied:
            with torch.no_grad():
                copy.copy_(master)
            layer.weight = copy
        try:
            return super().accumulate(micro_batches, targets, scale)
        finally:
            for layer, master, _ in self.copied:
                layer.weight = master


def _copy_of(master: nn.Parameter) -> nn.Parameter:
    """A copy in bf16 that passes its gradients on to the master weight."""

    def pass_on(copy: torch.Tensor) -> None:
        assert copy.grad is not None
        if master.grad is None:
            master.grad = copy.grad.float()
        else:
            master.grad.add_(copy.grad)
        copy.grad = None

    copy = nn.Parameter(master.detach().bfloat16())
    copy.register_post_accumulate_grad_hook(pass_on)  # pyright: ignore[reportUnknownMemberType]
    return copy
