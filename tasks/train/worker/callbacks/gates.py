"""Infini-attention's gates while training: their values by head, and warnings where they cannot do their work.

A gate passes gradient in proportion to g (1 - g), so one that saturates rarely returns: its head then ignores the memory or everything
else (docs/infini-attention.md).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.infini_attention import InfiniAttention
from infini_llama.model.llama import Llama
from infini_llama.tasks.storage.tensors import full_tensor

LOWEST, HIGHEST = 1e-3, 0.999
REACH = 1.0  # by which a gate, before the sigmoid, should be able to move: from 0.5 to 0.27 or 0.73
log = logging.getLogger("infini_llama.worker")


def gate_shares(model: Llama) -> list[list[float]]:
    """Share of memory in the output of each head, by layer; empty without Infini-attention. A collective call."""
    gates = [value.detach() for name, value in model.named_parameters() if name.endswith(".gate")]
    return [full_tensor(gate).sigmoid().tolist() for gate in gates]


class MemoryNorms:
    """Sizes of what a model's memories hold and give, over the forward passes inside of `observed`.

    Attributes:
        reads: by layer, root mean square of what queries find in memory, relative to local attention's output.
        writes: by layer, mean Frobenius norm of M, per head, that a row's last segment reads.
    """

    def __init__(self) -> None:
        self.sums: dict[int, list[float]] = {}

    @contextmanager
    def observed(self, model: nn.Module) -> Generator[None]:
        """Observe the model's layers inside; on a rank with a part of the heads, those."""
        layers = [module for module in model.modules() if isinstance(module, InfiniAttention) and module.has_memory]
        for number, layer in enumerate(layers):
            layer.observer = lambda local, retrieved, M, number=number: self._add(number, local, retrieved, M)
        try:
            yield
        finally:
            for layer in layers:
                layer.observer = None

    def _add(self, layer: int, local: torch.Tensor, retrieved: torch.Tensor, M: torch.Tensor) -> None:
        values = (
            retrieved.float().square().mean(),
            local.float().square().mean(),
            M[:, -1].float().norm(dim=(-2, -1)).mean(),
        )
        sums = self.sums.setdefault(layer, [0.0, 0.0, 0.0, 0.0])
        for place, value in enumerate((*torch.stack(values).tolist(), 1.0)):
            sums[place] += value

    @property
    def reads(self) -> tuple[float, ...]:
        return tuple((read / max(local, 1e-30)) ** 0.5 for _, (read, local, _, _) in sorted(self.sums.items()))

    @property
    def writes(self) -> tuple[float, ...]:
        return tuple(norm / count for _, (_, _, norm, count) in sorted(self.sums.items()))


class GateWarnings:
    """Logs each fault of a run's gates once per attempt.

    Args:
        reach: how far Adam can move a gate, before the sigmoid, in a run (`schedule.gate_reach`).
    """

    def __init__(self, train: TrainingConfig, max_steps: int, reach: float) -> None:
        self.train, self.max_steps, self.reach = train, max_steps, reach
        self.saturated = set[tuple[int, int]]()

    def at_start(self, segment_length: int, longest_document: int) -> None:
        """Before the first step.

        Args:
            longest_document: tokens of the longest training text.
        """
        if (most := self.reach) < REACH:
            low, high = (torch.tensor(sign * most).sigmoid().item() for sign in (-1, 1))
            log.warning(
                "train.gate_learning_rate=%g moves a gate of 0.5 at most to %.2f or %.2f in %d steps; raise it, or train longer",
                self.train.gate_learning_rate,
                low,
                high,
                self.max_steps,
            )
        if longest_document <= segment_length:
            log.warning(
                "the longest training text has %d tokens, one segment of model.segment_length=%d, so the memory is empty "
                "within each text; train on longer texts, or set shorter segments",
                longest_document,
                segment_length,
            )

    def observe(self, step: int, shares: Sequence[Sequence[float]]) -> None:
        """After a step before the last one; `shares` of `gate_shares`."""
        saturated = {
            (layer, head): share
            for layer, heads in enumerate(shares)
            for head, share in enumerate(heads)
            if not LOWEST <= share <= HIGHEST and (layer, head) not in self.saturated
        }
        if not saturated or step >= self.max_steps:
            return
        self.saturated |= saturated.keys()
        (layer, head), share = next(iter(saturated.items()))
        log.warning(
            "step %d: %d gate(s) saturated, the first in layer %d, head %d at %.1e of memory; a saturated gate gets almost no gradient. "
            "A train.gate_learning_rate of 0.003 to 0.01 keeps gates between the ends",
            step,
            len(saturated),
            layer,
            head,
            share,
        )
