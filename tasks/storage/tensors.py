"""Tensors in a folder, written and read through torch.distributed.checkpoint.

They are raw bytes and a table in JSON, no pickle. `rank-00000.bin` holds the parts that this rank
wrote, one after another, each at a multiple of 64 bytes; `tensors.json` is a `TensorTable`.
"""

import hashlib
import json
import math
import mmap
import os
import re
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from pydantic import ValidationError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import (
    StorageReader,
    StorageWriter,
    WriteResult,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future

from infini_llama.configs.errors import DataError, PipelineError
from infini_llama.tasks.records.record import Record, first_fault
from infini_llama.tasks.storage.filesystem import mapping

TABLE = "tensors.json"
FILE = "rank-{:05d}.bin"
ALIGNMENT = 64
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    )
}


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of one that may be sharded. A collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, under its name in a checkpoint."""
    return {
        f"model.{name}": parameter.detach()
        for name, parameter in model.named_parameters()
    }


def state_hash(tensors: dict[str, torch.Tensor], prefix: str) -> str:
    """sha256 over names, types, shapes and bytes of the tensors below `prefix`.

    Two are equal if and only if the tensors are bitwise equal. A collective call: sharded tensors
    are gathered one at a time.
    """
    digest = hashlib.sha256()
    for name in sorted(name for name in tensors if name.startswith(prefix)):
        value = full_tensor(tensors[name].detach()).cpu().contiguous()
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors` in place. The caller has verified the folder's checksums.

    Raises:
        ConfigError: a file cannot be mapped into memory here.
        DataError: the folder holds something other than these tensors.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    try:
        with warnings.catch_warnings():  # loading without a process group is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(
                tensors,
                storage_reader=TensorReader(folder),
                planner=planner,
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        # It is not an Exception, and it hides the message of the actual error.
        fault = next(iter(error.failures.values()))[0]
        # A request to stop, too, is one of its failures.
        if isinstance(fault, PipelineError) or not isinstance(fault, Exception):
            raise fault from error
        raise DataError(f"{folder} cannot be loaded: {fault}") from error


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder.

    Raises:
        DataError: its table is not as it was written.
    """
    return set(TensorReader(folder).read_metadata().state_dict_metadata)


class TensorPart(Record):
    """The block of a tensor that begins at `offsets`, in row-major order.

    `file` has it from byte `start` on.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int


class TensorEntry(Record):
    """A tensor.

    Attributes:
        dtype: one of DTYPES.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]


class TensorTable(Record):
    """Every tensor by its name.

    Attributes:
        byteorder: as `sys.byteorder`.
    """

    byteorder: str
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True)
class Location:
    """The place of a part: file, first byte, and the checksum of the whole file."""

    file: str
    start: int
    checksum: str


class TensorWriter(StorageWriter):
    """Writer of one synced file per rank, and, on the coordinator, of the table.

    The coordinator then knows every file's checksum.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = 0
        self.checksums: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.rank = kwargs["rank"]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        name = FILE.format(self.rank)
        digest = blake3(max_threads=blake3.AUTO)
        position = 0
        starts: list[tuple[MetadataIndex, int, int]] = []
        with (self.folder / name).open("wb", buffering=1 << 20) as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                raw = (
                    tensor.detach()
                    .cpu()
                    .contiguous()
                    .flatten()
                    .view(torch.uint8)
                    .numpy()
                    .data
                )
                padding = bytes(-position % ALIGNMENT)
                for piece in (padding, raw):
                    file.write(piece)
                    digest.update(piece)
                starts.append((item.index, position + len(padding), raw.nbytes))
                position += len(padding) + raw.nbytes
            file.flush()
            os.fsync(file.fileno())
        checksum = "blake3:" + digest.hexdigest()
        results = [
            WriteResult(index, size, Location(name, start, checksum))
            for index, start, size in starts
        ]
        result: Future[list[WriteResult]] = Future()
        result.set_result(results)
        return result

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts: defaultdict[str, list[TensorPart]] = defaultdict(list)
        for written in (written for of_rank in results for written in of_rank):
            place: Location = written.storage_data
            self.checksums[place.file] = place.checksum
            entry = metadata.state_dict_metadata[written.index.fqn]
            assert isinstance(entry, TensorStorageMetadata)
            sizes = next(
                chunk.sizes
                for chunk in entry.chunks
                if chunk.offsets == written.index.offset
            )
            part = TensorPart(
                offsets=tuple(written.index.offset or ()),
                sizes=tuple(sizes),
                file=place.file,
                start=place.start,
            )
            parts[written.index.fqn].append(part)
        tensors: dict[str, TensorEntry] = {}
        for name, entry in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = TensorEntry(
                dtype=str(entry.properties.dtype).removeprefix("torch."),
                shape=tuple(entry.size),
                parts=tuple(parts[name]),
            )
        table = TensorTable(byteorder=sys.byteorder, tensors=tensors)
        (self.folder / TABLE).write_text(json.dumps(table.to_json()), encoding="utf-8")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False


class TensorReader(StorageReader):
    """Reader of what TensorWriter wrote.

    A table that names anything but blocks of tensors inside the folder is refused.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[MetadataIndex, tuple[str, int, torch.Size, torch.dtype]] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            table = TensorTable.model_validate_json(
                (self.folder / TABLE).read_bytes(), strict=True
            )
            if table.byteorder != sys.byteorder:
                raise ValueError(
                    f"it was written on a {table.byteorder}-endian machine"
                )
            entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
                name: self._entry(name, entry) for name, entry in table.tensors.items()
            }
        except (OSError, ValueError, KeyError) as error:
            fault = first_fault(error) if isinstance(error, ValidationError) else error
            raise DataError(
                f"checkpoint {self.folder} cannot be loaded: {TABLE}: {fault}."
            ) from error
        return Metadata(entries)

    def _entry(self, name: str, entry: TensorEntry) -> TensorStorageMetadata:
        dtype = DTYPES[entry.dtype]
        chunks: list[ChunkStorageMetadata] = []
        for part in entry.parts:
            offsets = torch.Size(part.offsets)
            sizes = torch.Size(part.sizes)
            if not re.fullmatch(r"rank-\d{5,}\.bin", part.file):
                raise ValueError(
                    f"'{name}' is in '{part.file}', which is not a file of a checkpoint"
                )
            if min([part.start, *offsets, *sizes]) < 0 or part.start % ALIGNMENT:
                raise ValueError(f"'{name}' has an invalid part at {part}")
            end = part.start + math.prod(sizes) * dtype.itemsize
            if end > (self.folder / part.file).stat().st_size:
                raise ValueError(f"'{name}' extends beyond the end of {part.file}")
            self.places[MetadataIndex(name, offsets)] = (
                part.file,
                part.start,
                sizes,
                dtype,
            )
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
        return TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(entry.shape), chunks
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if not self.places:  # the coordinator alone has read the table so far
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, mmap.mmap] = {}
        for item in plan.items:
            name, start, sizes, dtype = self.places[item.storage_index]
            target = planner.resolve_tensor(item).detach()
            if math.prod(sizes):
                if name not in files:
                    with (
                        (self.folder / name).open("rb") as file,
                        mapping(self.folder / name),
                    ):
                        files[name] = mmap.mmap(
                            file.fileno(), 0, access=mmap.ACCESS_COPY
                        )
                flat = torch.frombuffer(
                    files[name],
                    dtype=dtype,
                    count=math.prod(sizes),
                    offset=start,
                )
                part = flat.view(sizes)
                spans = zip(item.storage_offsets, item.lengths, strict=True)
                for dimension, (first, length) in enumerate(spans):
                    part = part.narrow(dimension, first, length)
                target.copy_(part)
            planner.commit_tensor(item, target)
        result: Future[None] = Future()
        result.set_result(None)
        return result

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False
