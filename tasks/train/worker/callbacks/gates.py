"""Infini-attention's gates while training: their values by head, and warnings where they cannot do their work.

A gate passes gradient in proportion to g (1 - g), so one that saturates rarely returns: its head then ignores the memory or everything
else (docs/infini-attention.md).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.storage.tensors import full_tensor
from infini_llama.tasks.train.worker.strategies.schedule import gate_reach

LOWEST, HIGHEST = 1e-3, 0.999
REACH = 1.0  # by which a gate, before the sigmoid, should be able to move: from 0.5 to 0.27 or 0.73
log = logging.getLogger("infini_llama.worker")


def gate_shares(model: Llama) -> tuple[tuple[float, ...], ...]:
    """Share of memory in the output of each head, by layer; of a layer without a memory empty. A collective call.

    Without Infini-attention the result is empty.
    """
    shares = {
        layer: tuple(full_tensor(attention.gate.detach()).sigmoid().tolist())
        for layer, attention in model.memory_layers().items()
    }
    return (
        tuple(shares.get(layer, ()) for layer in range(model.config.num_hidden_layers))
        if shares
        else ()
    )


class MemoryNorms:
    """Sizes of what a model's memories hold and give, over the forward passes inside of `observed`.

    Attributes:
        reads: by layer, root mean square of what queries find in memory, relative to local attention's output; None: no memory.
        writes: by layer, mean Frobenius norm of M, per head, that a row's last segment reads; None: no memory.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.sums: dict[int, list[float]] = {}

    @contextmanager
    def observed(self, model: Llama) -> Generator[None]:
        """Observe the model's layers inside."""
        layers = model.memory_layers()
        for number, attention in layers.items():
            attention.observer = lambda local, retrieved, M, number=number: self._add(
                number, local, retrieved, M
            )
        try:
            yield
        finally:
            for attention in layers.values():
                attention.observer = None

    def _add(
        self, layer: int, local: torch.Tensor, retrieved: torch.Tensor, M: torch.Tensor
    ) -> None:
        values = (
            retrieved.float().square().mean(),
            local.float().square().mean(),
            M[:, -1].float().norm(dim=(-2, -1)).mean(),
        )
        sums = self.sums.setdefault(layer, [0.0, 0.0, 0.0, 0.0])
        for place, value in enumerate((*torch.stack(values).tolist(), 1.0)):
            sums[place] += value

    @property
    def reads(self) -> tuple[float | None, ...]:
        return self._by_layer(
            {
                layer: (read / max(local, 1e-30)) ** 0.5
                for layer, (read, local, _, _) in self.sums.items()
            }
        )

    @property
    def writes(self) -> tuple[float | None, ...]:
        return self._by_layer(
            {layer: norm / count for layer, (_, _, norm, count) in self.sums.items()}
        )

    def _by_layer(self, values: dict[int, float]) -> tuple[float | None, ...]:
        return tuple(values.get(layer) for layer in range(self.layers))


class GateWarnings:
    """Logs each fault of a run's gates once per attempt."""

    def __init__(self, train: TrainingConfig, max_steps: int) -> None:
        self.train, self.max_steps = train, max_steps
        self.saturated = set[tuple[int, int]]()

    def at_start(self, segment_length: int, longest_document: int) -> None:
        """Before the first step.

        Args:
            longest_document: tokens of the longest training text.
        """
        if (most := gate_reach(self.train, self.max_steps)) < REACH:
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

    def ignore(self, shares: Sequence[Sequence[float]]) -> None:
        """Gates that are saturated where an attempt starts: chosen so by train.init_gate, or logged by an earlier attempt."""
        self.saturated |= _saturated(shares).keys()

    def observe(self, step: int, shares: Sequence[Sequence[float]]) -> None:
        """After a step before the last one; `shares` of `gate_shares`."""
        saturated = {
            place: share
            for place, share in _saturated(shares).items()
            if place not in self.saturated
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


def _saturated(shares: Sequence[Sequence[float]]) -> dict[tuple[int, int], float]:
    """The share of each saturated gate, by layer and head."""
    return {
        (layer, head): share
        for layer, heads in enumerate(shares)
        for head, share in enumerate(heads)
        if not LOWEST <= share <= HIGHEST
    }
