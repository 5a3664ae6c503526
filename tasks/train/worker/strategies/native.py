"""How the model lies on the ranks: a whole copy each (DDP), or each rank its share of every parameter (FSDP2, HSDP)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from infini_llama.configs.errors import ConfigError
from infini_llama.model.context import Context
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


class LossModule(nn.Module):
    """Llama with its loss inside forward, where DistributedDataParallel and FSDP see it.

    With a `context` the loss is that of this rank's part of the rows; gradients of all ranks' losses together are right once they
    are summed over the ranks, whatever part each of them had.
    """

    def __init__(self, model: Llama, context: Context | None = None) -> None:
        super().__init__()
        self.model, self.context = model, context

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of the token cross-entropies of whole rows input_ids [b, T] against labels [b, T], a scalar in fp32.

        documents [b, T], where given, keeps the documents of a row apart (`model.layout`).
        """
        if self.context is not None:
            size = self.model.config.segment_length
            input_ids, labels = self.context.part(input_ids, size), self.context.part(labels, size)
        return self.model.loss(input_ids, labels, documents, self.context)[0]


def distribute(module: LossModule, train: dict, ranks: Ranks) -> nn.Module:
    """The module to train with, under `train.parallel`; each strategy averages gradients over the ranks.

    ddp: DistributedDataParallel. fsdp: every layer's parameters, gradients and optimizer state are split over all ranks
    (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054: stage 3, or 2 where `train.reshard_after_forward` is off). hsdp: split over
    `train.shard_size` ranks, and copied over the groups of that many. The parameters of `module` keep their names, and under
    the last two become DTensors in place. One rank alone needs none of them.

    Raises:
        ConfigError: the ranks are not whole groups of `train.shard_size`.
    """
    if ranks.world_size == 1:
        return module
    if train["parallel"] == "ddp":
        devices = [ranks.local_rank] if ranks.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
    shape = mesh_shape(train, ranks)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    reshard = train["reshard_after_forward"]
    for layer in module.model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return module


def mesh_shape(train: dict, ranks: Ranks) -> tuple[int, ...]:
    """fsdp: (ranks,); hsdp: (groups that have whole parameters between them, ranks of one)."""
    if train["parallel"] == "fsdp":
        return (ranks.world_size,)
    size = ranks.local_world_size if train["shard_size"] == "auto" else train["shard_size"]
    if ranks.world_size % size:
        raise ConfigError(
            f"train.shard_size={train['shard_size']}, but {ranks.world_size} worker(s) are no whole groups of {size}; "
            "choose a divisor, or train.parallel=fsdp."
        )
    return ranks.world_size // size, size


@contextmanager
def synchronized(module: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are reduced over the ranks by the backward passes inside only where this is the `last` one of a step."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        yield
    elif isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
    else:
        yield


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of one that may be sharded; every rank has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replica_of(value: torch.Tensor, ranks: Ranks) -> tuple[int, int]:
    """(which of them this rank has, how many) equal copies of this rank's part there are."""
    if not isinstance(value, DTensor):
        return ranks.rank, ranks.world_size
    index, count = 0, 1
    for dimension, placement in enumerate(value.placements):
        if placement.is_replicate():
            size = value.device_mesh.size(dimension)
            index, count = index * size + value.device_mesh.get_local_rank(dimension), count * size
    return index, count


def gathered(model: Llama, ranks: Ranks) -> Llama | None:
    """The whole model on the first rank, None on the others; the model itself where it is not sharded."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model if ranks.is_first else None
    state = {}
    for name, parameter in model.named_parameters():
        full = whole(parameter.detach())
        if ranks.is_first:
            state[name] = full
    if not ranks.is_first:
        return None
    return of_tensors(model, state)


def of_tensors(model: Llama, state: dict[str, torch.Tensor]) -> Llama:
    """A plain model of the same configuration that holds `state`'s tensors themselves, not copies of them."""
    with torch.device("meta"):
        plain = Llama(model.config)
    plain.load_state_dict(state, strict=False, assign=True)  # a tied head is not in it
    plain.tie_weights()
    return plain


def clip(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Scales all gradients down to the global 2-norm `max_norm`; returns the norm before that, the same on every rank."""
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
