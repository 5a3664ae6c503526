"""Writing and reading a checkpoint with all ranks: tensors by torch.distributed.checkpoint, scalars as JSON, one commit."""

import hashlib
import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from infini_llama.configs.errors import DataError
from infini_llama.tasks.runs.checkpoints import FORMAT_VERSION, KIND, STATE_FILE, checkpoint_path
from infini_llama.tasks.storage.artifacts import commit, staging
from infini_llama.tasks.train.worker.storage import TensorReader, TensorWriter
from infini_llama.tasks.train.worker.strategies.native import whole


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor that a run's state consists of, by name: parameters, and the optimizer's moments of each."""
    state = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                state[f"optimizer.{name}.{key}"] = value
    return state


def state_hash(state: dict[str, torch.Tensor], prefix: str) -> str:
    """sha256 over names, types, shapes and bytes of the tensors below `prefix`: equal if and only if bitwise equal.

    Sharded tensors are gathered one at a time, so every rank has to ask.
    """
    digest = hashlib.sha256()
    for name in sorted(name for name in state if name.startswith(prefix)):
        value = whole(state[name].detach()).cpu().contiguous()
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save(
    folder: Path, step: int, state: dict[str, torch.Tensor], scalars: dict, group: dist.ProcessGroup | None = None
) -> Path:
    """Commits `step-XXXXXXXX`: every rank of `group` writes its share into a staging folder, then the first commits it whole.

    Args:
        state: what this rank holds; of equal tensors on several ranks one writes each.
    """
    target = checkpoint_path(folder, step)
    first = dist.get_rank(group) == 0
    box = [str(staging(target)) if first else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    staged = Path(str(box[0]))
    writer = TensorWriter(staged)
    dcp_save(state, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False), process_group=group)
    if first:
        (staged / STATE_FILE).write_text(json.dumps(scalars, indent=1), encoding="utf-8")
        meta = {"torch": torch.__version__}
        commit(staged, target, KIND, FORMAT_VERSION, meta, content={"step": step}, checksums=writer.checksums)
    dist.barrier(group)
    return target


def load(checkpoint: Path, state: dict[str, torch.Tensor]) -> None:
    """Fills the tensors of `state` in place. The folder's checksums were verified by whoever chose it.

    Raises:
        DataError: the checkpoint holds something other than these tensors.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    try:
        with warnings.catch_warnings():  # one process without a group is meant, where there is none
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(state, storage_reader=TensorReader(checkpoint), planner=planner, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # not an Exception, and it hides the sentence that says what is wrong
        raise DataError(f"{checkpoint} cannot be loaded: {next(iter(error.failures.values()))[0]}") from error


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer allocate its state, which it otherwise does at its first step, so that it can be loaded into."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
