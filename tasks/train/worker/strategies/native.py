"""Strategies of torch itself.

They give each rank a copy of the model (DDP), or a shard of every parameter (FSDP2, HSDP).
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.context import Context
from infini_llama.model.llama import Llama
from infini_llama.tasks.storage.tensors import (
    full_tensor,
    load_tensors,
    model_tensors,
    tensor_names,
)
from infini_llama.tasks.train.worker.data.loader import Batch
from infini_llama.tasks.train.worker.strategies.optimizer import build_optimizer
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


class LossModule(nn.Module):
    """Llama with its loss inside forward, where DDP, FSDP and DeepSpeed's engine see it.

    With a `context` the loss is that of this rank's part of the sequences; gradients of all ranks'
    losses together are right once they are summed over the ranks, whatever part each of them had.
    """

    def __init__(
        self,
        model: Llama,
        context: Context | None = None,
        autocast: torch.autocast | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.context = context
        self.autocast = autocast or nullcontext()

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        documents: torch.Tensor | None = None,
        row_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum of the token cross-entropies of whole sequences, a scalar in fp32.

        Args:
            input_ids: [b, T].
            labels: [b, T].
            documents: [b, T], keeps the documents of a sequence apart (`model.layout`); None: they
                are not kept apart.
            row_weights: [b], of the rows in the gradient; None: 1.
        """
        if self.context is not None:
            size = self.model.config.segment_length
            input_ids = self.context.part(input_ids, size)
            labels = self.context.part(labels, size)
        # Not around the step, since DeepSpeed's engine switches off any there.
        with self.autocast:
            return self.model.loss(
                input_ids, labels, documents, self.context, row_weights
            )[0]


class NativeStrategy:
    """The model on one rank, and what DDP and FSDP add to; see `Strategy` for the methods."""

    def __init__(
        self,
        model: Llama,
        train: TrainingConfig,
        ranks: Ranks,
        autocast: torch.autocast,
        micro_batch_size: int,
    ) -> None:
        self.model = model
        self.train = train
        self.ranks = ranks
        self.module: nn.Module = LossModule(model, ranks.context, autocast)
        # Before the optimizer, which is given the sharded parameters.
        self.wrapped = self._wrap(model, self.module)
        self.optimizer = build_optimizer(model, train)
        init_optimizer_state(self.optimizer)
        self.norm = torch.zeros(())

    def _wrap(self, model: Llama, module: nn.Module) -> nn.Module:
        return module

    def _gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Backward passes inside reduce gradients over the ranks only for a step's `last` one."""
        return nullcontext()

    def accumulate(
        self,
        micro_batches: Sequence[Batch],
        targets: int,
        scale: float = 1.0,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self.ranks.device)
        for number, batch in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            with self._gradient_sync(last=is_last):
                loss = self.wrapped(*batch)
                # The strategy averages over the ranks, whose number is multiplied in beforehand.
                factor = self.ranks.world_size / targets * scale
                (loss * factor).backward()
            total += loss.detach()
        return total

    def clip_gradients(self, scale: float = 1.0) -> None:
        gradients = [
            parameter.grad
            for parameter in self.wrapped.parameters()
            if parameter.grad is not None
        ]
        if scale != 1.0:
            for gradient in gradients:
                gradient.mul_(1.0 / scale)
        self.norm = full_tensor(nn.utils.get_total_norm(gradients))
        nn.utils.clip_grads_with_norm_(
            self.wrapped.parameters(), self.train.max_grad_norm, self.norm
        )

    def update(self, apply: bool, scale: float = 1.0) -> float:
        norm = self.norm.item()
        if apply and math.isfinite(norm):
            self.optimizer.step()
        self.discard_gradients()
        return norm

    def discard_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = model_tensors(self.model)
        trained = {
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        for name, parameter in self.model.named_parameters():
            assert parameter in trained or not parameter.requires_grad, (
                f"the optimizer does not know {name}"
            )
            state = self.optimizer.state.get(parameter, {})  # a frozen one has none
            for key, value in state.items():
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def load_tensors(
        self, checkpoint: Path, has_own_optimizer: bool = True
    ) -> list[str]:
        return load_but_for_new_state(checkpoint, self.tensors(), has_own_optimizer)

    def full_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def to_plain_model(self) -> Llama | None:
        if not any(
            isinstance(parameter, DTensor) for parameter in self.model.parameters()
        ):
            return self.model if self.ranks.is_rank0 else None
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            full = full_tensor(parameter.detach())
            if self.ranks.is_rank0:
                tensors[name] = full.cpu()  # a GPU has room for its shard
        return plain_model(self.model, tensors) if self.ranks.is_rank0 else None


class DDP(NativeStrategy):
    """DistributedDataParallel: a copy of the model per rank.

    Gradients are averaged over the ranks.
    """

    wrapped: DistributedDataParallel

    def _wrap(self, model: Llama, module: nn.Module) -> nn.Module:
        devices = [self.ranks.local_rank] if self.ranks.device.type == "cuda" else None
        return DistributedDataParallel(
            module, device_ids=devices, gradient_as_bucket_view=True
        )

    def _gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.wrapped.no_sync()


class FSDP(NativeStrategy):
    """FSDP2: parameters, gradients and optimizer state of every layer are split over ranks.

    These are all ranks, or for hsdp groups of `train.shard_size` ranks, between which they are
    copied. (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054: `train.zero_stage` 3, or 2.) The
    parameters of the model keep their names and become DTensors in place.
    """

    def _wrap(self, model: Llama, module: nn.Module) -> nn.Module:
        # The plan refuses ranks that are not a multiple of the ranks per copy.
        world_size = self.ranks.world_size
        size = self.train.shards(world_size, self.ranks.local_world_size)
        shape = (size,) if self.train.parallel == "fsdp" else (world_size // size, size)
        names = ("replicas", "shards")[-len(shape) :]
        mesh = init_device_mesh(self.ranks.device.type, shape, mesh_dim_names=names)
        reshard = self.train.zero_stage != 2
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)  # in place
        return module

    def _gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        self.wrapped.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
        return nullcontext()

    def tensors(self) -> dict[str, torch.Tensor]:
        self._reshard()
        return super().tensors()

    def to_plain_model(self) -> Llama | None:
        self._reshard()
        return super().to_plain_model()

    def _reshard(self) -> None:
        """Shard the parameters again.

        Under stage 2, an evaluation leaves whole parameters, which are others than those that the
        optimizer knows.
        """
        for module in self.wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def replica_of(value: torch.Tensor, ranks: Ranks) -> tuple[int, int]:
    """(index of this rank's copy, number of equal copies) of this rank's part of a tensor."""
    if not isinstance(value, DTensor):
        return ranks.rank, ranks.world_size
    index = 0
    count = 1
    for dimension, placement in enumerate(value.placements):
        if placement.is_replicate():
            size = value.device_mesh.size(dimension)
            index = index * size + value.device_mesh.get_local_rank(dimension)
            count *= size
    return index, count


def plain_model(model: Llama, tensors: dict[str, torch.Tensor]) -> Llama:
    """A model of the same configuration without hooks or shards.

    It has `tensors` themselves, not copies of them.
    """
    with torch.device("meta"):
        plain = Llama(model.config)
    # A tied head is not in it.
    plain.load_state_dict(tensors, strict=False, assign=True)
    plain.tie_weights()
    return plain


def load_but_for_new_state(
    checkpoint: Path, tensors: dict[str, torch.Tensor], has_own_optimizer: bool
) -> list[str]:
    """Fill tensors from a checkpoint, but for state that the optimizer itself has not written.

    That state stays as it is, zero as before a first step.

    Args:
        tensors: model and optimizer, see `Strategy.tensors`.
        has_own_optimizer: see `Strategy.load_tensors`.

    Returns:
        names of the tensors that were not filled.
    """
    of_optimizer = {name for name in tensors if name.startswith("optimizer.")}
    anew = (
        of_optimizer - tensor_names(checkpoint) if has_own_optimizer else of_optimizer
    )
    known = {name: value for name, value in tensors.items() if name not in anew}
    load_tensors(checkpoint, known)
    return sorted(anew)


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its state, zeros, which it otherwise does at its first step.

    Nothing else changes. So a checkpoint has it also if every update so far was skipped, and a
    resumed run loads into it.
    """
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, learning_rate in zip(
        optimizer.param_groups, learning_rates, strict=True
    ):
        group["lr"] = learning_rate
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
