"""train.parallel=deepspeed: DeepSpeed's ZeRO below this project's trainer and checkpoints.

ZeRO is that of Rajbhandari et al. 2020, arXiv 1910.02054. The engine partitions, reduces, clips and
updates. Its own checkpoints are pickles and are not used: what it partitions is gathered parameter
by parameter, and a checkpoint has it under the names and in the shapes of every other strategy.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import logging
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from infini_llama.configs.deepspeed import engine_settings
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.optimizers import OPTIMIZERS
from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.storage.tensors import full_tensor
from infini_llama.tasks.train.worker.data.loader import Batch
from infini_llama.tasks.train.worker.strategies.native import (
    LossModule,
    init_optimizer_state,
    load_but_for_new_state,
    plain_model,
)
from infini_llama.tasks.train.worker.strategies.optimizer import build_optimizer
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


def load_deepspeed(device: torch.device) -> Any:
    """Import the package for one kind of device.

    Raises:
        ConfigError: it is not installed, or does not import.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        # deepspeed.utils is used as an attribute.
        import deepspeed  # pyright: ignore[reportMissingImports]
        import deepspeed.ops  # pyright: ignore[reportMissingImports]
        import deepspeed.utils  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError as error:
        raise ConfigError(
            f"train.parallel=deepspeed needs the package deepspeed ({error}): "
            "pip install 'infini-llama[deepspeed]', "
            "or choose train.parallel=fsdp, which shards the same state."
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # An all-reduce for inference, which would be compiled by a C++ compiler at the first start;
    # training does not call it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeed:
    """The engine around a model and its optimizer, which it makes its own.

    The optimizer's groups hold this rank's flat partitions. See `Strategy` for the methods.
    """

    def __init__(
        self,
        model: Llama,
        train: TrainingConfig,
        ranks: Ranks,
        autocast: torch.autocast,
        micro_batch_size: int,
    ) -> None:
        self.deepspeed = load_deepspeed(ranks.device)
        self.model = model
        self.ranks = ranks
        self.optimizer = build_optimizer(model, train)
        self.moments = OPTIMIZERS[train.optimizer].update.moments
        self.parameters_by_name = dict(model.named_parameters())
        self.apply = True
        update = self.optimizer.step

        def step(*_: Any) -> Any:
            """Update if `apply`.

            The engine cannot skip an update whose gradients are finite, as one after a loss spike.
            """
            return update() if self.apply else None

        self.optimizer.step = step  # pyright: ignore[reportAttributeAccessIssue]
        self.engine = self.deepspeed.initialize(
            model=LossModule(model, ranks.context, autocast),
            optimizer=self.optimizer,
            config=engine_settings(train, micro_batch_size, ranks.world_size),
            dist_init_required=False,
        )[0]
        self.module: nn.Module = self.engine
        # The engine finds the moments of all groups when it has updated the first one.
        init_optimizer_state(self.optimizer)
        self.stage: int = self.engine.zero_optimization_stage()
        self.mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))

    def accumulate(
        self,
        micro_batches: Sequence[Batch],
        targets: int,
        scale: float = 1.0,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self.ranks.device)
        for number, batch in enumerate(micro_batches):
            loss = self.engine(*batch)
            # The engine averages over the ranks, whose number is multiplied in beforehand.
            is_last = number == len(micro_batches) - 1
            self.engine.set_gradient_accumulation_boundary(is_last)
            factor = self.ranks.world_size / targets * scale
            self.engine.backward(loss * factor, scale_wrt_gas=False)
            total += loss.detach()
        return total

    def clip_gradients(self, scale: float = 1.0) -> None:
        """The engine clips in `update`, in its own partitions."""

    def update(self, apply: bool, scale: float = 1.0) -> float:
        self.apply = apply
        self.engine.optimizer.override_loss_scale(scale)
        self.engine.step()
        self.engine.optimizer.override_loss_scale(1.0)
        return _finite_or_inf(float(self.engine.get_global_grad_norm()))

    def discard_gradients(self) -> None:
        """An update of rate 0; the moments exist from here on, and are zero.

        Raises:
            FloatingPointError: the gradients are not finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        norm = self.update(apply=True)
        if not math.isfinite(norm):
            raise FloatingPointError("the gradients of the first batch are not finite")
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        """Each rank has its rows of every tensor, as under FSDP2."""
        utils = self.deepspeed.utils
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters_by_name.items():
            state[f"model.{name}"] = self._rows(
                utils.safe_get_full_fp32_param(parameter)
            )
            for moment in self.moments:
                state[f"optimizer.{name}.{moment}"] = self._rows(
                    utils.safe_get_full_optimizer_state(parameter, moment)
                )
            state[f"optimizer.{name}.step"] = self._updates()[0].clone()
        return state

    @torch.no_grad()
    def load_tensors(
        self, checkpoint: Path, has_own_optimizer: bool = True
    ) -> list[str]:
        tensors = self.tensors()
        anew = load_but_for_new_state(checkpoint, tensors, has_own_optimizer)
        utils = self.deepspeed.utils
        for name, parameter in self.parameters_by_name.items():
            weights = full_tensor(tensors[f"model.{name}"])
            with self._gathered([parameter], modified=True):
                parameter.copy_(weights)
            moments = {
                moment: full_tensor(tensors[f"optimizer.{name}.{moment}"])
                for moment in self.moments
            }
            if self.stage < 3:
                utils.safe_set_full_fp32_param(parameter, weights)
                for moment, value in moments.items():
                    utils.safe_set_full_optimizer_state(parameter, value, moment)
            else:
                utils.safe_set_local_fp32_param(
                    parameter, self._partition(parameter, weights)
                )
                for moment, value in moments.items():
                    utils.safe_set_local_optimizer_state(
                        parameter, self._partition(parameter, value), moment
                    )
        for updates in self._updates():
            updates.copy_(
                tensors[f"optimizer.{next(iter(self.parameters_by_name))}.step"]
            )
        return anew

    def full_parameters(self) -> AbstractContextManager[None]:
        return self._gathered(list(self.parameters_by_name.values()))

    def _gathered(
        self,
        parameters: list[nn.Parameter],
        modified: bool = False,
    ) -> AbstractContextManager[None]:
        """Inside, these parameters are whole on every rank; stage 3 alone splits them."""
        first = 0 if modified else None
        return self.deepspeed.zero.GatheredParameters(
            parameters,
            modifier_rank=first,
            enabled=self.stage == 3,
        )

    def to_plain_model(self) -> Llama | None:
        if self.stage < 3:
            return self.model if self.ranks.is_rank0 else None
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters_by_name.items():
            with self._gathered([parameter]):
                if self.ranks.is_rank0:
                    tensors[name] = parameter.detach().to("cpu", copy=True)
        return plain_model(self.model, tensors) if self.ranks.is_rank0 else None

    def _updates(self) -> list[torch.Tensor]:
        """How many updates each partition has had, which is the same for all."""
        return [state["step"] for state in self.optimizer.state.values()]

    def _partition(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of `full` under stage 3.

        The last rank's is filled up with zeros, which the engine's own setter cannot do.
        """
        size = parameter.ds_tensor.ds_numel  # pyright: ignore[reportAttributeAccessIssue]
        padding = size * self.mesh.size() - full.numel()
        filled = nn.functional.pad(full.flatten(), (0, padding))
        return filled.narrow(0, size * self.mesh.get_rank(), size)

    def _rows(self, full: torch.Tensor) -> DTensor:
        rows = distribute_tensor(full, self.mesh, [Shard(0)], src_data_rank=None)
        return rows.clone()  # pyright: ignore[reportReturnType]


def _finite_or_inf(norm: float) -> float:
    """The norm, or inf for gradients that are not finite.

    Whether the engine reports these as inf, nan or -1 depends on its stage.
    """
    return norm if math.isfinite(norm) and norm >= 0 else math.inf
