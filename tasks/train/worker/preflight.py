"""Checks before the first step.

Every rank is there, the nodes have the same code, versions and data, and a collective call works.
The ranks report to the store in which torchrun's agents have found each other, so that one that is
missing is named.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
import hashlib
import json
import os
import platform
import socket
import time
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import Field
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from infini_llama.configs.errors import ConfigError, DataError, PipelineError
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.runs.status import NODE
from infini_llama.tasks.storage.artifacts import ROW_TABLES, read_manifest
from infini_llama.tasks.train.worker.data.loader import curriculum_stages_of

POLL_SECONDS = 0.05
PREFLIGHT_SECONDS = 120.0
ROOT = Path(__file__).parents[3]
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


def preflight(attempt: AttemptPlan) -> Store | None:
    """Run the checks; returns the store for the training's process group, None for a single rank.

    Raises:
        PipelineError: names the missing ranks, or what failed between those that are there; another
            attempt may succeed.
        ConfigError: gloo is to use an interface that this machine does not have.
        ConfigError, DataError: as `require_same_nodes`.
    """
    refuse_absent_interface()
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    nnodes = attempt.plan.nnodes
    if world_size == 1:
        return None
    seconds = preflight_seconds(
        attempt.config.environment.communication_timeout, nnodes
    )
    store = connect(rank, world_size, seconds)
    if nnodes > 1:
        require_same_nodes(attempt, store)
    sum_over_ranks(store, rank, world_size, seconds)
    return store


def refuse_absent_interface() -> None:
    """Check GLOO_SOCKET_IFNAME, of the user or of `rendezvous.gloo_interface`.

    Raises:
        ConfigError: it names no interface of this machine.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    absent = [name for name in named if name and name not in interfaces]
    if absent:
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME={os.environ['GLOO_SOCKET_IFNAME']}, "
            f"but {socket.gethostname()} has the interfaces {', '.join(interfaces)}; "
            "correct it (environment.env), or unset it."
        )


def preflight_seconds(communication_timeout: float, nnodes: int) -> float:
    """Seconds for each check.

    On one machine, which may be loaded, at least as long as for a collective call in training.
    """
    return (
        PREFLIGHT_SECONDS
        if nnodes > 1
        else max(PREFLIGHT_SECONDS, communication_timeout)
    )


def connect(rank: int, world_size: int, seconds: float) -> Store:
    """Report to torchrun's store, and wait for all other ranks there.

    Raises:
        PipelineError: names the ranks that are missing after `seconds`.
    """
    until = time.monotonic() + seconds
    timeout = timedelta(seconds=seconds)
    results = rendezvous("env://", rank, world_size, timeout=timeout)
    store, _, _ = next(iter(results))
    store.set(f"there-{rank}", socket.gethostname())
    _await(store, "there", world_size, until, f"has not responded within {seconds:g} s")
    return store


def sum_over_ranks(store: Store, rank: int, world_size: int, seconds: float) -> None:
    """One barrier and one sum over a process group, which is destroyed again.

    The process group of the training has other timeouts.

    Raises:
        PipelineError: what failed, or which ranks did not complete it.
    """
    until = time.monotonic() + seconds
    timeout = timedelta(seconds=seconds)
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("preflight", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        dist.monitored_barrier(timeout=timeout, wait_all_ranks=True)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world_size
        store.set(f"passed-{rank}", "")
        _await(
            store,
            "passed",
            world_size,
            until + seconds,
            "has not passed the first all-reduce",
        )
    except RuntimeError as fault:
        raise PipelineError(
            f"rank {rank} on {socket.gethostname()} cannot reach all other ranks: {fault}"
        ) from fault
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _await(
    store: Store, what: str, world_size: int, until: float, complaint: str
) -> None:
    """Wait until each rank has set `what`.

    Raises:
        PipelineError: names the ranks that have not by `until`, with the host where it is known.
    """
    missing = list(range(world_size))
    while True:
        missing = [rank for rank in missing if not store.check([f"{what}-{rank}"])]
        if not missing:
            return
        if time.monotonic() > until:
            names = _names_with_hosts(store, missing)
            raise PipelineError(
                f"rank {names} {complaint}; see the logs on its machine."
            )
        time.sleep(POLL_SECONDS)


def _names_with_hosts(store: Store, ranks: list[int]) -> str:
    """The ranks' numbers, each with its host if it has reported to the store."""
    hosts = {
        rank: store.get(f"there-{rank}").decode()
        for rank in ranks
        if store.check([f"there-{rank}"])
    }
    return ", ".join(
        f"{rank} on {hosts[rank]}" if rank in hosts else str(rank) for rank in ranks
    )


class NodeFacts(Record):
    """The state of one node. fault: why its data cannot be read."""

    node: int
    host: str
    facts: dict[str, str] = Field(default_factory=dict)
    fault: str = ""


def require_same_nodes(attempt: AttemptPlan, store: Store) -> None:
    """Compare the nodes of an attempt; a collective call of all ranks, which raise the same.

    Raises:
        ConfigError: a sentence for each difference.
        DataError: a node does not see the dataset, or sees a damaged one.
    """
    if os.environ["LOCAL_RANK"] == "0":
        number = int(os.environ[NODE])
        host = socket.gethostname()
        try:
            facts_here = NodeFacts(node=number, host=host, facts=facts(attempt))
        except DataError as fault:
            facts_here = NodeFacts(
                node=number, host=host, fault=f"node {number} ({host}): {fault}"
            )
        store.set(f"facts-{number}", facts_here.model_dump_json())
    nodes = [
        NodeFacts.model_validate(json.loads(store.get(f"facts-{node}")))
        for node in range(attempt.plan.nnodes)
    ]
    faults = [node.fault for node in nodes if node.fault]
    if faults:
        raise DataError("\n".join(faults))
    unlike = [line for node in nodes[1:] for line in differences(nodes[0], node)]
    if unlike:
        raise ConfigError("the nodes differ", unlike)


def facts(attempt: AttemptPlan) -> dict[str, str]:
    """The state of this machine, by a name for people.

    Raises:
        DataError: the dataset is not here, or damaged.
    """
    dataset = attempt.dataset_path
    tables = [attempt.dataset.row_table, *(name for name, _ in attempt.shorter_rows)]
    return {
        "code of infini-llama": code_digest(),
        "python": platform.python_version(),
        **{name: _version(name) for name in VERSIONS},
        "dataset": read_manifest(dataset, "dataset").digest,
        "rows": " ".join(
            read_manifest(dataset / ROW_TABLES / table, ROW_TABLES).digest
            for table in tables
        ),
        "order and tokens of the first rows": first_rows_digest(attempt),
    }


def first_rows_digest(attempt: AttemptPlan) -> str:
    """Digest of the run's first global batch.

    It covers the row numbers, and the tokens of some of the rows as they are read here.
    """
    train = attempt.config.train
    first = curriculum_stages_of(attempt)[0]
    rows = first.rows(0, train.global_batch_size, train.seed)
    tokens = first.reader.gather(rows[:ROWS])
    digest = hashlib.blake2b(rows.astype("<i8").tobytes(), digest_size=16)
    digest.update(tokens.astype("<i8").tobytes())
    return digest.hexdigest()


def code_digest(root: Path = ROOT) -> str:
    """Digest of every Python file that workers may import from us, by path and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            head = f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0"
            digest.update(head.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def differences(first: NodeFacts, other: NodeFacts) -> list[str]:
    """A sentence for each fact in which a node differs from the first one."""
    return [
        f"node {other.node} ({other.host}) has {name} {other.facts.get(name)}, "
        f"but node 0 ({first.host}) has {value}."
        for name, value in first.facts.items()
        if other.facts.get(name) != value
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
