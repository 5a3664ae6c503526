"""Infini-attention's gates while training: values by head, and warnings where they cannot work.

A gate passes gradient in proportion to g (1 - g), so one that saturates rarely returns: its head
then ignores the memory or everything else (docs/infini-attention.md).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from infini_llama.configs.schedules import learning_rate_factor
from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.storage.tensors import full_tensor

# Shares of memory below and above which a gate is saturated.
LOWEST = 1e-3
HIGHEST = 0.999
# Distance that a gate, before the sigmoid, should be able to move: from 0.5 to 0.27 or 0.73.
REACH = 1.0
SAMPLED_STEPS = 10_000
log = logging.getLogger("infini_llama.worker")


def gate_reach(train: TrainingConfig, max_steps: int) -> float:
    """How far Adam can move a gate, before the sigmoid, in a run.

    The sum of the gates' learning rates over its steps; in a long run it is estimated from
    SAMPLED_STEPS or a few more of them.
    """
    every = max(1, max_steps // SAMPLED_STEPS)
    factors = [
        learning_rate_factor(train, max_steps, step)
        for step in range(every // 2, max_steps, every)
    ]
    return train.gate_learning_rate * max_steps * sum(factors) / len(factors)


def gate_shares(model: Llama) -> tuple[tuple[float, ...], ...]:
    """Share of memory in the output of each head, by layer. A collective call.

    It is empty for a layer without a memory. Without Infini-attention the result is empty.
    """
    shares: dict[int, tuple[float, ...]] = {}
    for layer, attention in model.memory_layers().items():
        gate = full_tensor(attention.gate.detach())
        shares[layer] = tuple(gate.sigmoid().tolist())
    if not shares:
        return ()
    return tuple(
        shares.get(layer, ()) for layer in range(model.config.num_hidden_layers)
    )


class MemoryNorms:
    """Sizes of what a model's memories hold and give, over the forward passes inside of `observed`.

    Attributes:
        reads: by layer, root mean square of what queries that may read find in memory, relative to
            local attention's output; None: no memory, or no such query.
        writes: by layer, mean Frobenius norm of M, per head, that a row's last segment reads; None:
            no memory, or no segment that reads it.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.sums: dict[int, list[float]] = {}

    @contextmanager
    def observed(self, model: Llama) -> Generator[None]:
        """Observe the model's layers inside."""
        layers = model.memory_layers()
        for number, attention in layers.items():
            attention.observer = partial(self._add, number)
        try:
            yield
        finally:
            for attention in layers.values():
                attention.observer = None

    def _add(
        self,
        layer: int,
        local: torch.Tensor,
        retrieved: torch.Tensor,
        M: torch.Tensor,
        reads: torch.Tensor | None,
    ) -> None:
        norms = M[:, -1].float().norm(dim=(-2, -1))  # [B, Hkv]
        if reads is not None:
            reads = reads.expand(len(M), -1, -1)  # of context parallelism: [1, S, N]
            norms = norms[reads[:, -1].any(dim=-1)]
            may_read = reads[:, :, None, :, None]
            local = local * may_read
            retrieved = retrieved * may_read
        values = (
            retrieved.float().square().sum(),
            local.float().square().sum(),
            norms.sum(),
        )
        sums = self.sums.setdefault(layer, [0.0, 0.0, 0.0, 0.0])
        for place, value in enumerate((*torch.stack(values).tolist(), norms.numel())):
            sums[place] += value

    @property
    def reads(self) -> tuple[float | None, ...]:
        ratios = {
            layer: (read / local) ** 0.5
            for layer, (read, local, _, _) in self.sums.items()
            if local
        }
        return self._by_layer(ratios)

    @property
    def writes(self) -> tuple[float | None, ...]:
        means = {
            layer: norm / heads
            for layer, (_, _, norm, heads) in self.sums.items()
            if heads
        }
        return self._by_layer(means)

    def _by_layer(self, values: dict[int, float]) -> tuple[float | None, ...]:
        return tuple(values.get(layer) for layer in range(self.layers))


class GateWarnings:
    """Logs each fault of a run's gates once per attempt."""

    def __init__(self, train: TrainingConfig, max_steps: int) -> None:
        self.train = train
        self.max_steps = max_steps
        self.saturated = set[tuple[int, int]]()

    def at_start(self, unread: int, longest_document: int) -> None:
        """Warn before the first step, where gates hardly move or no text fills the memory.

        Args:
            unread: tokens of a text up to the first that reads its memory.
            longest_document: tokens of the longest training text.
        """
        most = gate_reach(self.train, self.max_steps)
        if most < REACH:
            low = torch.tensor(-most).sigmoid().item()
            high = torch.tensor(most).sigmoid().item()
            log.warning(
                "train.gate_learning_rate=%g moves a gate of 0.5 at most to %.2f or %.2f in %d "
                "steps; raise it, or train longer",
                self.train.gate_learning_rate,
                low,
                high,
                self.max_steps,
            )
        if longest_document <= unread:
            log.warning(
                "the longest training text has %d tokens, and the memory is empty for the first %d "
                "of each text; train on longer texts, or set a shorter model.segment_length",
                longest_document,
                unread,
            )

    def ignore(self, shares: Sequence[Sequence[float]]) -> None:
        """Never warn of the gates that are saturated where an attempt starts.

        They were chosen so by train.init_gate, or logged by an earlier attempt.
        """
        self.saturated |= _saturated(shares).keys()

    def observe(self, step: int, shares: Sequence[Sequence[float]]) -> None:
        """Warn of the gates that are newly saturated after a step, but not after the last one.

        Args:
            shares: of `gate_shares`.
        """
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
            "step %d: %d gate(s) saturated, the first in layer %d, head %d at %.1e of memory; "
            "a saturated gate gets almost no gradient. "
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
