"""Preparation of all parts of the text: in this process, in several of this machine, or by the workers of a Dask or Ray cluster.

A cluster's workers see the home folder through a shared filesystem. A unit has a temporary name until it is complete and renamed, so a
worker that was given up for lost cannot damage what its successor wrote: both write the same bytes.
"""

import multiprocessing
import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.tokens.parts import Filters, Part, PartReader, PartReport
from infini_llama.tasks.preprocess.tokens.units import TOKENIZER, Recipe, write_unit

AHEAD = 4  # parts submitted beyond one per worker
LOSSES = 3  # workers of a cluster that may die at one part before the build fails
PACKAGES = ("infini-llama", "tokenizers", "gigatoken", "pyarrow", "numpy", "msgspec", "xxhash", "python")


@dataclass(frozen=True)
class Job:
    """What is done with every part."""

    recipe: Recipe
    filters: Filters


@dataclass(frozen=True)
class Pool:
    """Workers.

    Attributes:
        size: how many there are.
        submit: starts `prepare_part` for one part on any of them.
        lost: raised by the future of a part whose worker was killed, or whose machine was lost.
    """

    size: int
    submit: Callable[[Part], "Future[PartReport]"]
    lost: tuple[type[Exception], ...]


def prepare_part(job: Job, part: Part) -> PartReport:
    """Reads a part and writes those of its units that are missing or damaged."""
    reader = PartReader(part, job.filters)
    for documents in reader.units():
        write_unit(job.recipe, documents)
    return reader.report()


def prepare_parts(job: Job, parts: Sequence[Part], data: DataConfig) -> Iterator[tuple[Part, PartReport]]:
    """Each part and what was read of it, in any order.

    Raises:
        DataError: bad input; see `PartReader` and `write_unit`.
        PipelineError: a worker was killed, or differs from this machine; finished units are kept.
        EngineDiffers: a fast engine gave other ids than the reference.
    """
    count = min(data.num_workers, len(parts))
    if data.engine == "local" and count < 2:
        yield from ((part, prepare_part(job, part)) for part in parts)
        return
    if not parts:
        return
    pools = {"local": lambda: _processes(job, count), "dask": lambda: _dask(job, data), "ray": lambda: _ray(job, data)}
    with pools[data.engine]() as pool:
        waiting = iter(parts)
        pending = {pool.submit(part): part for part in islice(waiting, pool.size + AHEAD)}
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                part = pending.pop(future)
                try:
                    report = future.result()
                except pool.lost:
                    raise PipelineError(
                        f"a worker of preprocess was killed at or near {part}, perhaps for lack of memory. Finished units are "
                        "kept: run the same command again, with more memory per worker (a smaller data.num_workers)."
                    ) from None
                pending |= {pool.submit(part): part for part in islice(waiting, 1)}
                yield part, report


@contextmanager
def _processes(job: Job, count: int) -> Iterator[Pool]:
    """`count` processes with an equal share of the cores; if the block raises, they end at once, in the middle of their parts."""
    threads = max(1, len(os.sched_getaffinity(0)) // count) if hasattr(os, "sched_getaffinity") else 1
    spawn = multiprocessing.get_context("spawn")
    try:
        spawn.Lock()
    except OSError as fault:
        raise ConfigError(
            f"data.num_workers={count} needs shared memory, and /dev/shm cannot be used ({fault.strerror}); mount it (docker "
            "run --shm-size=1g), or set data.num_workers=1."
        ) from fault
    reading_end, writing_end = spawn.Pipe(duplex=False)
    with ProcessPoolExecutor(count, spawn, initializer=_begin, initargs=(threads, reading_end)) as executor:
        try:
            yield Pool(count, lambda part: executor.submit(prepare_part, job, part), (BrokenProcessPool,))
        except BaseException:
            writing_end.close()
            raise


def _begin(threads: int, pipe: Connection) -> None:
    """In a worker process: takes its share of the cores, and ends when the parent closes the pipe or dies."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    threading.Thread(target=lambda: wait_for([pipe]) and os._exit(1), daemon=True).start()


def prepare_part_elsewhere(job: Job, part: Part, versions: dict[str, str]) -> PartReport:
    """`prepare_part` on a cluster's worker, whose machine must have the same packages and see the same folders.

    Raises:
        PipelineError: it does not.
    """
    worker = f"the worker on {socket.gethostname()}, process {os.getpid()},"
    differences = [
        f"{name} {_version(name)}, not {other}" for name, other in versions.items() if _version(name) != other
    ]
    if differences:
        raise PipelineError(f"{worker} has {', '.join(differences)}; install the same there as here.")
    if not (job.recipe.folder / TOKENIZER).is_file():
        raise PipelineError(
            f"{worker} cannot access {job.recipe.folder}; runtime.home must be on a filesystem that all machines share."
        )
    return prepare_part(job, part)


def versions() -> dict[str, str]:
    """Versions of the packages that determine the bytes that a worker writes."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return platform.python_version() if name == "python" else version(name)
    except PackageNotFoundError:
        return "not installed"


@contextmanager
def _dask(job: Job, data: DataConfig) -> Iterator[Pool]:
    """The Dask cluster that DASK_SCHEDULER_ADDRESS names, or one of `data.num_workers` processes started for this build."""
    with _installed(data):
        distributed, config = import_module("distributed"), import_module("dask").config
    local = {"n_workers": data.num_workers, "threads_per_worker": 1, "dashboard_address": None, "host": "127.0.0.1"}
    with config.set({"distributed.scheduler.allowed-failures": LOSSES - 1}):
        try:
            client = distributed.Client(
                **({} if os.environ.get("DASK_SCHEDULER_ADDRESS") else local), timeout=30, set_as_default=False
            )
        except OSError as fault:
            raise _silent("DASK_SCHEDULER_ADDRESS", fault) from None
        with client, client.get_executor(pure=False) as executor:
            driver_versions, size = versions(), len(client.scheduler_info(n_workers=-1)["workers"])
            yield Pool(
                max(size, data.num_workers),
                lambda part: executor.submit(prepare_part_elsewhere, job, part, driver_versions),
                (distributed.KilledWorker,),
            )


@contextmanager
def _ray(job: Job, data: DataConfig) -> Iterator[Pool]:
    """The Ray cluster that RAY_ADDRESS names, or one of `data.num_workers` CPUs started for this build."""
    with _installed(data):
        ray = import_module("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = {"address": "local", "num_cpus": data.num_workers, "include_dashboard": False}
    try:
        context = ray.init(
            **({} if os.environ.get("RAY_ADDRESS") else local),
            log_to_driver=False,
            configure_logging=False,
            namespace="infini-llama",
        )
    except ConnectionError as fault:
        raise _silent("RAY_ADDRESS", fault) from None
    with context:
        driver_versions, remote = versions(), ray.remote(max_retries=LOSSES - 1, num_cpus=1)(prepare_part_elsewhere)
        size = int(ray.cluster_resources().get("CPU", 1))
        try:
            faults = ray.exceptions
            lost = (faults.WorkerCrashedError, faults.OutOfMemoryError, faults.NodeDiedError)
            yield Pool(size, lambda part: remote.remote(job, part, driver_versions).future(), lost)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None


def _silent(variable: str, fault: Exception) -> ConfigError:
    return ConfigError(f"no cluster answers at {variable}={os.environ.get(variable)} ({fault}); correct or unset it.")


@contextmanager
def _installed(data: DataConfig) -> Iterator[None]:
    try:
        yield
    except ImportError as missing:
        raise ConfigError(
            f"data.engine={data.engine}: {missing.name} is not installed; install infini-llama[{data.engine}]."
        ) from None
