"""train.parallel=deepspeed: DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) below this project's loop and checkpoints.

The engine partitions, reduces, clips and updates. Its own checkpoints are pickles and are not used: what it partitions is asked for
parameter by parameter, and stands in a checkpoint under the names and in the shapes of every other strategy.
"""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from infini_llama.configs.errors import ConfigError
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.checkpoint import prime
from infini_llama.tasks.train.worker.strategies.native import of_tensors
from infini_llama.tasks.train.worker.strategies.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")


def load_deepspeed(device: torch.device) -> Any:
    """The package, told which device to use.

    Raises:
        ConfigError: it is not installed, or does not import.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]
        import deepspeed.ops  # pyright: ignore[reportMissingImports]
        import deepspeed.utils  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"train.parallel=deepspeed needs the package deepspeed ({error}): pip install 'infini-llama[deepspeed]', "
            "or choose train.parallel=fsdp, which splits the same state."
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # An all-reduce for inference, which would be compiled by a C++ compiler at the first start; training does not call it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class InPrecision(nn.Module):
    """Forward under autocast of its own: the engine switches off any around it. Weights stay in fp32, as everywhere here."""

    def __init__(self, module: nn.Module, autocast: torch.autocast) -> None:
        super().__init__()
        self.module, self.autocast = module, autocast

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        with self.autocast:
            return self.module(*batch)


class Zero(nn.Module):
    """The engine around a model and its optimizer, which it makes its own.

    Args:
        module: returns the sum of a micro-batch's losses.
        optimizer: AdamW or Adam over the parameters of `model`; its groups hold this rank's flat partitions afterwards.
        settings: of `configs.deepspeed.engine_settings`.
    """

    def __init__(
        self,
        module: nn.Module,
        model: Llama,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        ranks: Ranks,
        autocast: torch.autocast,
    ) -> None:
        super().__init__()
        self.deepspeed = load_deepspeed(ranks.device)
        self.parameters_by_name = dict(model.named_parameters())
        self.optimizer, self.wanted = optimizer, True
        update = optimizer.step
        # The engine has no word for leaving out an update whose gradients are finite, as one after a loss spike.
        optimizer.step = lambda *_: update() if self.wanted else None  # pyright: ignore[reportAttributeAccessIssue]
        self.engine = self.deepspeed.initialize(
            model=InPrecision(module, autocast), optimizer=optimizer, config=settings, dist_init_required=False
        )[0]
        prime(optimizer)  # the engine finds the moments of all groups when it has updated the first one
        self.stage = settings["zero_optimization"]["stage"]
        self.mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.engine(*batch)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Adds the gradients of `loss`, averaged over the ranks; `last` of an update's micro-batches."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self, wanted: bool, scale: float = 1.0) -> float:
        """Clips and updates where that is `wanted` and the gradients are finite; returns their norm before clipping, inf where not.

        Args:
            scale: what the losses were multiplied by.
        """
        self.wanted = wanted
        self.engine.optimizer.override_loss_scale(scale)
        self.engine.step()
        self.engine.optimizer.override_loss_scale(1.0)
        return _finite_or_inf(float(self.engine.get_global_grad_norm()))

    def forget(self) -> None:
        """Drops the gradients of a throw-away batch, with an update of rate 0; the moments exist from here on, and are zero.

        Raises:
            FloatingPointError: the gradients are not finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        if not math.isfinite(self.step(wanted=True)):
            raise FloatingPointError("the gradients of the first batch are not finite")
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        """As `checkpoint.tensors`; each rank holds its rows of every tensor, as under FSDP2. Every rank has to ask."""
        utils, state = self.deepspeed.utils, {}
        for name, parameter in self.parameters_by_name.items():
            state[f"model.{name}"] = self._rows(utils.safe_get_full_fp32_param(parameter))
            for moment in MOMENTS:
                state[f"optimizer.{name}.{moment}"] = self._rows(utils.safe_get_full_optimizer_state(parameter, moment))
            state[f"optimizer.{name}.step"] = self._updates()[0].clone()
        return state

    @torch.no_grad()
    def take(self, state: dict[str, torch.Tensor]) -> None:
        """Puts what `tensors` named, filled from a checkpoint, into this rank's partitions. Every rank has to ask."""
        utils = self.deepspeed.utils
        for name, parameter in self.parameters_by_name.items():
            weights = _gathered(state[f"model.{name}"])
            with self.whole([parameter], modified=True):
                parameter.copy_(weights)
            moments = {moment: _gathered(state[f"optimizer.{name}.{moment}"]) for moment in MOMENTS}
            if self.stage < 3:
                utils.safe_set_full_fp32_param(parameter, weights)
                for moment, value in moments.items():
                    utils.safe_set_full_optimizer_state(parameter, value, moment)
            else:
                utils.safe_set_local_fp32_param(parameter, self._partition(parameter, weights))
                for moment, value in moments.items():
                    utils.safe_set_local_optimizer_state(parameter, self._partition(parameter, value), moment)
        for updates in self._updates():
            updates.copy_(state[f"optimizer.{next(iter(self.parameters_by_name))}.step"])

    @contextmanager
    def whole(self, parameters: list[nn.Parameter] | None = None, modified: bool = False) -> Iterator[None]:
        """Within it the parameters (all without a list) are whole on every rank; stage 3 alone splits them. Every rank has to ask."""
        chosen = list(self.parameters_by_name.values()) if parameters is None else parameters
        first = 0 if modified else None
        with self.deepspeed.zero.GatheredParameters(chosen, modifier_rank=first, enabled=self.stage == 3):
            yield

    def unhooked(self, model: Llama, ranks: Ranks) -> Llama:
        """On the first rank a model that it can use alone: stage 3's has hooks that ask all ranks. Every rank has to ask."""
        if self.stage < 3:
            return model
        state = {}
        for name, parameter in self.parameters_by_name.items():
            with self.whole([parameter]):
                if ranks.is_first:
                    state[name] = parameter.detach().clone()
        return of_tensors(model, state) if ranks.is_first else model

    def _updates(self) -> list[torch.Tensor]:
        """How many updates each partition has had, which is the same for all."""
        return [state["step"] for state in self.optimizer.state.values()]

    def _partition(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """This rank's part under stage 3, where the last rank's is filled up with zeros (the engine's own setter cannot)."""
        size = parameter.ds_tensor.ds_numel  # pyright: ignore[reportAttributeAccessIssue]
        filled = nn.functional.pad(full.flatten(), (0, size * self.mesh.size() - full.numel()))
        return filled.narrow(0, size * self.mesh.get_rank(), size)

    def _rows(self, full: torch.Tensor) -> DTensor:
        return distribute_tensor(full, self.mesh, [Shard(0)], src_data_rank=None).clone()  # pyright: ignore[reportReturnType]


def _finite_or_inf(norm: float) -> float:
    """As which of inf, nan and -1 the engine tells of gradients that are not finite depends on its stage."""
    return norm if math.isfinite(norm) and norm >= 0 else math.inf


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
