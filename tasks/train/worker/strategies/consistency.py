"""What has to be the same on every node before the first step: code, versions, dataset and its order.

The nodes exchange it over the store in which torchrun's agents have found each other.
"""

import hashlib
import json
import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import Field
from torch.distributed.distributed_c10d import Store

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.records.resolved_run import ResolvedRun
from infini_llama.tasks.runs.status import NODE
from infini_llama.tasks.storage.artifacts import read_manifest
from infini_llama.tasks.train.worker.data.loader import stages_of_run

ROOT = Path(__file__).parents[4]
PACKAGES = ("configs", "model", "tasks")  # all that a worker runs
VERSIONS = (
    "infini-llama",
    "torch",
    "numpy",
    "pyarrow",
    "tokenizers",
    "safetensors",
    "triton",
    "flash-attn",
)
ROWS = 64  # whose tokens are read


def code_digest(root: Path = ROOT) -> str:
    """Digest of every Python file that workers may import from us, by path and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class NodeFacts(Record):
    """The state of one node. fault: why its data cannot be read."""

    node: int
    host: str
    facts: dict[str, str] = Field(default_factory=dict)
    fault: str = ""


def require_same_nodes(resolved: ResolvedRun, store: Store) -> None:
    """Compare the nodes of an attempt; a collective call of all ranks, which raise the same.

    Raises:
        ConfigError: a sentence for each difference.
        DataError: a node does not see the dataset, or sees a damaged one.
    """
    if os.environ["LOCAL_RANK"] == "0":
        number, host = int(os.environ[NODE]), socket.gethostname()
        try:
            mine = NodeFacts(node=number, host=host, facts=facts(resolved))
        except DataError as fault:
            mine = NodeFacts(node=number, host=host, fault=f"node {number} ({host}): {fault}")
        store.set(f"facts-{number}", mine.model_dump_json())
    nodes = [NodeFacts.from_json(json.loads(store.get(f"facts-{node}"))) for node in range(resolved.plan.nnodes)]
    if faults := [node.fault for node in nodes if node.fault]:
        raise DataError("\n".join(faults))
    if unlike := [line for node in nodes[1:] for line in differences(nodes[0], node)]:
        raise ConfigError("the nodes differ", unlike)


def facts(resolved: ResolvedRun) -> dict[str, str]:
    """The state of this machine, by a name for people.

    Raises:
        DataError: the dataset of `job` is not here, or damaged.
    """
    dataset = resolved.dataset_path
    tables = [resolved.dataset.chunks, *(chunks for chunks, _ in resolved.shorter_rows)]
    return {
        "code of infini-llama": code_digest(),
        "python": platform.python_version(),
        **{name: _version(name) for name in VERSIONS},
        "dataset": read_manifest(dataset, "dataset").digest,
        "rows": " ".join(read_manifest(dataset / "chunks" / table, "chunks").digest for table in tables),
        "order and tokens of the first rows": first_rows_digest(resolved),
    }


def first_rows_digest(resolved: ResolvedRun) -> str:
    """Digest of the run's first global batch: its row numbers, and the tokens of some of them as they are read here."""
    train = resolved.config.train
    first = stages_of_run(resolved)[0]
    rows = first.rows(0, train.global_batch_size, train.seed)
    digest = hashlib.blake2b(rows.astype("<i8").tobytes(), digest_size=16)
    digest.update(first.reader.gather(rows[:ROWS]).astype("<i8").tobytes())
    return digest.hexdigest()


def differences(first: NodeFacts, other: NodeFacts) -> list[str]:
    """A sentence for each fact in which a node differs from the first one."""
    return [
        f"node {other.node} ({other.host}) has {name} {other.facts.get(name)}, but node 0 ({first.host}) has {here}."
        for name, here in first.facts.items()
        if other.facts.get(name) != here
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
