"""Writing and reading a checkpoint with all ranks: tensors by torch.distributed.checkpoint, scalars as JSON, one commit."""

import hashlib
import json
import pickle
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as metadata_classes
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from configs.errors import DataError
from tasks.artifacts import commit, staging
from tasks.train.checkpoints import FORMAT_VERSION, KIND, STATE_FILE, checkpoint_path
from tasks.train.worker.strategy import whole

# DCP keeps its table of contents as a pickle. Only what such a table is made of may be built from it; anything else,
# whatever the file says, is refused before it runs.
DCP_CLASSES = (
    "Metadata",
    "MetadataIndex",
    "ChunkStorageMetadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "StorageMeta",
)
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (*DCP_CLASSES, "_MEM_FORMAT_ENCODING")),
    *(("torch", name) for name in (*DTYPES, "Size")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}


def _memory_format(owner: type, name: str) -> object:
    """Stands in for `getattr`, by which some versions of Python write down the member of an enumeration."""
    if owner is not metadata_classes._MEM_FORMAT_ENCODING:
        raise DataError(
            f"checkpoint metadata asks for {owner}.{name}, which no checkpoint of ours contains; it is not loaded."
        )
    return metadata_classes._MEM_FORMAT_ENCODING[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) not in ALLOWED:
            raise DataError(
                f"checkpoint metadata asks for {module}.{name}, which no checkpoint of ours contains; it is not loaded."
            )
        return super().find_class(module, name)


class TensorReader(FileSystemReader):
    """DCP's reader for checkpoints of tensors alone: its metadata passes an allow-list, its files stay inside the folder."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise DataError(f"checkpoint {self.path} holds '{name}', which is no tensor; it is not loaded.")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path or info.transform_descriptors:
                raise DataError(
                    f"checkpoint {self.path} names the file '{info.relative_path}' outside its folder; it is not loaded."
                )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorWriter(FileSystemWriter):
    """DCP's writer, without this machine's paths in what it writes. Nothing is synced here: commit() does that, once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch's archive writer hides a full disk behind a complaint about its own position
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


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
    dcp_save(state, storage_writer=TensorWriter(staged), process_group=group)
    if first:
        (staged / STATE_FILE).write_text(json.dumps(scalars, indent=1), encoding="utf-8")
        commit(staged, target, KIND, FORMAT_VERSION, meta={"torch": torch.__version__}, content={"step": step})
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
