"""The workers of a Dask or Ray cluster: this process hands out parts of a work, and parts of lost workers are done again.

A worker sees home through a shared filesystem. What it writes has a name of its own until it is whole and renamed, so that a worker
that was given up for lost and lives cannot tear what its successor wrote: both write the same bytes.
"""

import os
import platform
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.schema import DataConfig

AHEAD = 4  # parts handed out beyond one per worker
ANSWERS_WITHIN = 10.0  # seconds
LOSSES = 3  # workers that may die of one part before the build gives up
PACKAGES = ("infini-llama", "tokenizers", "gigatoken", "pyarrow", "numpy", "msgspec", "xxhash", "python")

Shared = TypeVar("Shared")
Part = TypeVar("Part")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Terms:
    """What must be the same on a worker as here. witness: a file that it must see."""

    versions: dict[str, str]
    witness: Path


class Cluster(Protocol):
    """Connected workers.

    Attributes:
        workers: how many there are, or more.
    """

    workers: int

    def run(
        self, work: Callable[[Shared, Part], Answer], shared: Shared, parts: Sequence[Part], witness: Path
    ) -> Iterator[tuple[Part, Answer]]:
        """Each part and what `work` of it returned, as it comes.

        Args:
            shared: of all parts; each worker gets it once.
            parts: their `str` names them in messages.
            witness: a file that shows to a worker that it sees the same folders.

        Raises:
            PipelineError: a part killed one worker after another, or a worker differs from this machine.
        """
        ...


def versions() -> dict[str, str]:
    """What decides the bytes that a worker writes."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return platform.python_version() if name == "python" else version(name)
    except PackageNotFoundError:
        return "not installed"


def worker_name() -> str:
    """This process, for messages."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def do_part(work: Callable[[Shared, Part], Answer], shared: Shared, part: Part, terms: Terms) -> Answer:
    """On the worker: does one part.

    Raises:
        PipelineError: this machine has other versions, or does not see the same folders.
    """
    if differing := [
        f"{name} {_version(name)}, not {other}" for name, other in terms.versions.items() if _version(name) != other
    ]:
        raise PipelineError(
            f"the worker on {worker_name()} has {', '.join(differing)}; install the same there as here."
        )
    if not terms.witness.is_file():
        raise PipelineError(
            f"the worker on {worker_name()} cannot access {terms.witness.parent}; runtime.home must be on a filesystem "
            "that all machines share."
        )
    return work(shared, part)


@contextmanager
def open_cluster(data: DataConfig) -> Iterator[Cluster]:
    """The cluster of `data.engine_address`, or one of the kind `data.engine` started on this machine.

    Raises:
        ConfigError: the engine is not installed, or its cluster does not answer.
    """
    _refuse_silent(data)
    try:
        module = import_module("distributed" if data.engine == "dask" else data.engine)
    except ImportError as missing:
        raise ConfigError(
            f"data.engine={data.engine}: {missing.name} is not installed; install infini-llama[{data.engine}]."
        ) from None
    with CLUSTERS[data.engine](module, data) as cluster:
        yield cluster


def _refuse_silent(data: DataConfig) -> None:
    """A cluster that is not there is named within seconds; Ray would try for minutes."""
    place = re.fullmatch(r"(?:\w+://)?([^:/]+):(\d+)", data.engine_address or "")
    if place is None:
        return
    try:
        socket.create_connection((place[1], int(place[2])), timeout=ANSWERS_WITHIN).close()
    except OSError as fault:
        raise _silent(data, fault) from None


def _silent(data: DataConfig, fault: Exception) -> ConfigError:
    return ConfigError(
        f"data.engine_address={data.engine_address}: no {data.engine.capitalize()} cluster answers there ({fault})."
    )


def _lost(part: object, engine: str) -> PipelineError:
    return PipelineError(
        f"{LOSSES} or more {engine} workers were lost at {part}, perhaps for lack of memory. Finished work is kept: run "
        "the same command again, with more memory per worker."
    )


class DaskCluster:
    """Workers of Dask."""

    def __init__(self, distributed: Any, client: Any, data: DataConfig) -> None:
        self.distributed, self.client, self.versions = distributed, client, versions()
        self.workers = max(len(client.scheduler_info(n_workers=-1)["workers"]), data.num_workers)

    def run(
        self, work: Callable[[Shared, Part], Answer], shared: Shared, parts: Sequence[Part], witness: Path
    ) -> Iterator[tuple[Part, Answer]]:
        """As `Cluster.run`."""
        terms, waiting, submitted = Terms(self.versions, witness), iter(parts), dict[str, Part]()
        # the answer of a task is made again where its worker dies, which what is scattered is not
        whole = self.client.submit(_itself, shared, pure=False)

        def submit(part: Part) -> Any:
            future = self.client.submit(do_part, work, whole, part, terms, pure=False)
            submitted[future.key] = part
            return future

        first = [submit(part) for part in islice(waiting, self.workers + AHEAD)]
        running = self.distributed.as_completed(first, loop=self.client.loop)
        for future in running:
            try:
                answer = future.result()
            except self.distributed.KilledWorker:
                raise _lost(submitted[future.key], "Dask") from None
            if (following := next(waiting, None)) is not None:
                running.add(submit(following))
            yield submitted.pop(future.key), answer


def _itself(value: Shared) -> Shared:
    return value


@contextmanager
def _over_dask(distributed: Any, data: DataConfig) -> Iterator[DaskCluster]:
    dask = import_module("dask")
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": LOSSES - 1}),
        _dask_scheduler(distributed.LocalCluster, data) as address,
    ):
        try:
            client = distributed.Client(address, timeout=30, set_as_default=False)
        except OSError as fault:
            raise _silent(data, fault) from None
        with client:
            yield DaskCluster(distributed, client, data)


@contextmanager
def _dask_scheduler(local: Any, data: DataConfig) -> Iterator[str]:
    if data.engine_address:
        yield data.engine_address
        return
    with local(n_workers=data.num_workers, threads_per_worker=1, dashboard_address=None, host="127.0.0.1") as cluster:
        yield cluster.scheduler_address


class RayCluster:
    """Workers of Ray, one per CPU."""

    def __init__(self, ray: Any, data: DataConfig) -> None:
        self.ray, self.versions = ray, versions()
        self.workers = int(ray.cluster_resources().get("CPU", 1))

    def run(
        self, work: Callable[[Shared, Part], Answer], shared: Shared, parts: Sequence[Part], witness: Path
    ) -> Iterator[tuple[Part, Answer]]:
        """As `Cluster.run`."""
        remote = self.ray.remote(max_retries=LOSSES - 1, num_cpus=1)(do_part)
        terms, waiting, running = Terms(self.versions, witness), iter(parts), dict[Any, Part]()
        whole = self.ray.put(shared)
        for part in islice(waiting, self.workers + AHEAD):
            running[remote.remote(work, whole, part, terms)] = part
        while running:
            (done,), _ = self.ray.wait([*running], num_returns=1)
            part = running.pop(done)
            try:
                answer = self.ray.get(done)
            except self.ray.exceptions.WorkerCrashedError:
                raise _lost(part, "Ray") from None
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause from None
            if (following := next(waiting, None)) is not None:
                running[remote.remote(work, whole, following, terms)] = following
            yield part, answer


@contextmanager
def _over_ray(ray: Any, data: DataConfig) -> Iterator[RayCluster]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    mine = {"num_cpus": data.num_workers, "include_dashboard": False} if not data.engine_address else {}
    try:
        context = ray.init(
            address=data.engine_address or "local",
            log_to_driver=False,
            configure_logging=False,
            namespace="infini-llama",
            **mine,
        )
    except ConnectionError as fault:
        raise _silent(data, fault) from None
    with context:
        yield RayCluster(ray, data)


CLUSTERS = {"dask": _over_dask, "ray": _over_ray}
