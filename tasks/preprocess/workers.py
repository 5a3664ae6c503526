"""Preparation of all parts of the text by threads, processes, or a Dask or Ray cluster.

What a worker does with its part is in tokens/. A cluster's workers see the home folder through a
shared filesystem; a unit is renamed when it is complete, so a worker that was given up for lost
cannot damage what its successor wrote.
"""

import multiprocessing
import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from multiprocessing.connection import Connection

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.formatting import in_bytes
from infini_llama.tasks.machine import Machine, memory, usable_cores
from infini_llama.tasks.preprocess.tokens.parts import (
    UNIT_BYTES,
    Filters,
    Part,
    PartReader,
    PartReport,
    never,
)
from infini_llama.tasks.preprocess.tokens.units import Recipe, write_unit
from infini_llama.tasks.records.decision import Decision
from infini_llama.tasks.storage.dataset_files import TOKENIZER

# Threads share the engine, which encodes outside of Python's lock, as hashing and the disk do. What
# Python itself does takes about a quarter of the time: more threads would wait for each other.
MOST_THREADS = 4
ENOUGH_THREADS = (
    "more threads would wait for one another, "
    "and there is too little text for more processes"
)
WORTH_A_PROCESS = 2**26  # bytes of text, which take longer than a start of Python
# Bytes: the text and tokens of a unit, and in a process the interpreter and an engine.
WORKER_MEMORY = 2**29
ADDRESSES = {"dask": "DASK_SCHEDULER_ADDRESS", "ray": "RAY_ADDRESS"}
AHEAD = 4  # parts submitted beyond one per worker
MOST_DEATHS = 3  # of workers of a cluster at one part: then the build fails
PACKAGES = (
    "infini-llama",
    "tokenizers",
    "gigatoken",
    "pyarrow",
    "numpy",
    "msgspec",
    "xxhash",
    "python",
)


@dataclass(frozen=True)
class Job:
    """The work that is done with every part."""

    recipe: Recipe
    filters: Filters


@dataclass(frozen=True)
class Pool:
    """Workers.

    Attributes:
        size: how many there are.
        submit: starts `prepare_part` for one part on any of them.
        worker_died: errors that the future of a part raises whose worker was killed, or whose
            machine was lost.
    """

    size: int
    submit: Callable[[Part], "Future[PartReport]"]
    worker_died: tuple[type[Exception], ...]


@dataclass(frozen=True)
class Workers:
    """How many parts are prepared at once.

    Attributes:
        count: 0: as many as the cluster has.
        choice: None where data.num_workers says it.
    """

    count: int
    are_threads: bool
    choice: Decision | None


def choose_workers(
    data: DataConfig,
    parts: Sequence[Part],
    machine: Machine,
) -> Workers:
    """The workers for the preparation of these parts."""
    text = sum(map(_text_bytes, parts))
    text_for_python = sum(
        _text_bytes(part) for part in parts if part.files[0].is_read_by_python
    )
    is_read_by_python = 2 * text_for_python > text
    if data.num_workers != "auto":
        count = min(data.num_workers, max(1, len(parts)))
        return Workers(count, _are_threads(data, count, is_read_by_python), None)
    if os.environ.get(ADDRESSES.get(data.engine, "")):
        choice = Decision(
            setting="data.num_workers",
            value="all",
            reason=f"those of the cluster at {ADDRESSES[data.engine]}",
        )
        return Workers(0, False, choice)
    cores = usable_cores(machine)
    available = memory(machine).available
    # The most workers by each reason.
    limits = {
        f"{cores} usable core(s)": cores,
        f"{len(parts)} part(s) of text": len(parts),
        f"{in_bytes(available)} of free memory, "
        f"of which a worker takes {in_bytes(WORKER_MEMORY)}": available
        // WORKER_MEMORY,
    }
    by_text = f"{in_bytes(text)} of text, of which each is to have {in_bytes(WORTH_A_PROCESS)}"
    limits[by_text] = text // WORTH_A_PROCESS
    fewest = min(limits.values())
    if fewest <= MOST_THREADS and _are_threads(data, MOST_THREADS, is_read_by_python):
        del limits[by_text]  # threads cost no start of Python
        limits[ENOUGH_THREADS] = MOST_THREADS
    reason = min(limits, key=limits.__getitem__)  # the first of several equal ones
    count = max(1, limits[reason])
    are_threads = _are_threads(data, count, is_read_by_python)
    choice = Decision(
        setting="data.num_workers",
        value=f"{count} {_kind_of_worker(count, are_threads)}",
        reason=reason,
    )
    return Workers(count, are_threads, choice)


def _kind_of_worker(count: int, are_threads: bool) -> str:
    if are_threads:
        return "thread" if count == 1 else "threads"
    return "process" if count == 1 else "processes"


def _are_threads(data: DataConfig, count: int, is_read_by_python: bool) -> bool:
    """Whether so many workers are threads here: several only if Python does not read the text."""
    if data.engine != "local":
        return False
    return count == 1 or (count <= MOST_THREADS and not is_read_by_python)


def _text_bytes(part: Part) -> int:
    """Bytes to read; about as many as a unit has where the size of a range is unknown."""
    return part.size or (UNIT_BYTES if part.span else 0)


def prepare_part(
    job: Job,
    part: Part,
    should_stop: Callable[[], bool] = never,
) -> PartReport:
    """Read a part and write those of its units that are missing or damaged."""
    reader = PartReader(part, job.filters, should_stop)
    for documents in reader.units():
        write_unit(job.recipe, documents, should_stop)
    return reader.report()


def prepare_parts(
    job: Job,
    parts: Sequence[Part],
    data: DataConfig,
    workers: Workers,
) -> Iterator[tuple[Part, PartReport]]:
    """Each part and what was read of it, in any order.

    Raises:
        DataError: bad input; see `PartReader` and `write_unit`.
        PipelineError: a worker was killed, or differs from this machine; finished units are kept.
        EngineDiffers: a fast engine gave other ids than the reference.
    """
    match data.engine:
        case "dask":
            opened = _dask(job, data, workers.count)
        case "ray":
            opened = _ray(job, data, workers.count)
        case "local":
            open_local = _threads if workers.are_threads else _processes
            opened = open_local(job, workers.count)
    with opened as pool:
        waiting = iter(parts)
        first = islice(waiting, pool.size + AHEAD)
        pending = {pool.submit(following): following for following in first}
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                part = pending.pop(future)
                try:
                    report = future.result()
                    for following in islice(waiting, 1):
                        pending[pool.submit(following)] = following
                except pool.worker_died:
                    raise PipelineError(
                        f"a worker of preprocess was killed at or near {part}, perhaps for lack of "
                        "memory. Finished units are kept: run the same command again, with more "
                        "memory per worker (a smaller data.num_workers)."
                    ) from None
                yield part, report


@contextmanager
def _threads(job: Job, count: int) -> Iterator[Pool]:
    """`count` threads of this process.

    If the block raises, they end within a batch of text, and are waited for.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(count, "preprocess") as executor:
        try:
            yield Pool(
                size=count,
                submit=lambda part: executor.submit(
                    prepare_part, job, part, stop.is_set
                ),
                worker_died=(BrokenExecutor,),
            )
        except BaseException:
            stop.set()
            executor.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _processes(job: Job, count: int) -> Iterator[Pool]:
    """`count` processes with an equal share of the cores.

    If the block raises, they end at once, in the middle of their parts.
    """
    from concurrent.futures import ProcessPoolExecutor  # only where there are some

    threads = max(1, usable_cores(Machine()) // count)
    spawn = multiprocessing.get_context("spawn")
    try:
        spawn.Lock()
    except OSError as fault:
        raise ConfigError(
            f"data.num_workers={count} needs shared memory, and /dev/shm cannot be used "
            f"({fault.strerror}); mount it (docker run --shm-size=1g), or set data.num_workers=1."
        ) from fault
    reading_end, writing_end = spawn.Pipe(duplex=False)
    with ProcessPoolExecutor(
        count,
        spawn,
        initializer=_begin,
        initargs=(threads, reading_end),
    ) as executor:
        try:
            yield Pool(
                size=count,
                submit=lambda part: executor.submit(prepare_part, job, part),
                worker_died=(BrokenExecutor,),
            )
        except BaseException:
            writing_end.close()
            raise


def _begin(threads: int, pipe: Connection) -> None:
    """Take this worker process's share of the cores, and watch the parent's end of the pipe."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()


def _end_with_parent(pipe: Connection) -> None:
    """End this process when the parent closes the pipe or dies."""
    if pipe.poll(None):
        os._exit(1)


def prepare_part_elsewhere(
    job: Job,
    part: Part,
    versions: dict[str, str],
) -> PartReport:
    """Prepare a part on a cluster's worker.

    Its machine must have the same packages and see the same folders.

    Raises:
        PipelineError: it does not.
    """
    worker = f"the worker on {socket.gethostname()}, process {os.getpid()},"
    differences = [
        f"{name} {_version(name)}, not {other}"
        for name, other in versions.items()
        if _version(name) != other
    ]
    if differences:
        raise PipelineError(
            f"{worker} has {', '.join(differences)}; install the same there as here."
        )
    if not (job.recipe.folder / TOKENIZER).is_file():
        raise PipelineError(
            f"{worker} cannot access {job.recipe.folder}; "
            "runtime.home must be on a filesystem that all machines share."
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
def _dask(job: Job, data: DataConfig, count: int) -> Iterator[Pool]:
    """The Dask cluster that DASK_SCHEDULER_ADDRESS names, or one of `count` processes.

    The latter is started for this build. If the block raises, parts that wait are canceled. Those
    that run go on to their end on the workers of a cluster that stays.
    """
    with _installed(data):
        distributed = import_module("distributed")
        config = import_module("dask").config
    local = {
        "n_workers": count,
        "threads_per_worker": 1,
        "dashboard_address": None,
        "host": "127.0.0.1",
    }
    cluster = {} if os.environ.get(ADDRESSES["dask"]) else local
    with config.set({"distributed.scheduler.allowed-failures": MOST_DEATHS - 1}):
        try:
            client = distributed.Client(**cluster, timeout=30, set_as_default=False)
        except Exception as fault:  # a local cluster's faults have no class in common
            raise _not_started("dask", fault) from None
        with client, client.get_executor(pure=False) as executor:
            here = versions()
            size = len(client.scheduler_info(n_workers=-1)["workers"])
            try:
                yield Pool(
                    size=max(size, count),
                    submit=lambda part: executor.submit(
                        prepare_part_elsewhere, job, part, here
                    ),
                    worker_died=(distributed.KilledWorker,),
                )
            except BaseException:
                # Otherwise every part that was submitted is waited for.
                executor.shutdown(wait=False)
                raise


@contextmanager
def _ray(job: Job, data: DataConfig, count: int) -> Iterator[Pool]:
    """The Ray cluster that RAY_ADDRESS names, or one of `count` CPUs started for this build.

    If the block raises, this process disconnects at once. A cluster that was started here ends with
    its tasks; one that stays is left running, and Ray decides what becomes of the parts that run
    there.
    """
    with _installed(data):
        ray = import_module("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = {"address": "local", "num_cpus": count, "include_dashboard": False}
    cluster = {} if os.environ.get(ADDRESSES["ray"]) else local
    try:
        context = ray.init(
            **cluster,
            log_to_driver=False,
            configure_logging=False,
            namespace="infini-llama",
        )
    except Exception as fault:
        # Ray raises bare exceptions where a process of it does not start in time.
        raise _not_started("ray", fault) from None
    with context:
        here = versions()
        remote = ray.remote(max_retries=MOST_DEATHS - 1, num_cpus=1)(
            prepare_part_elsewhere
        )
        size = int(ray.cluster_resources().get("CPU", 1))
        try:
            faults = ray.exceptions
            yield Pool(
                size=size,
                submit=lambda part: remote.remote(job, part, here).future(),
                worker_died=(
                    faults.WorkerCrashedError,
                    faults.OutOfMemoryError,
                    faults.NodeDiedError,
                ),
            )
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None


def _not_started(engine: str, fault: Exception) -> PipelineError:
    first_line = next(iter(str(fault).splitlines()), "")
    why = first_line.rstrip(".") or type(fault).__name__
    address = os.environ.get(ADDRESSES[engine])
    if address:
        return ConfigError(
            f"no cluster answers at {ADDRESSES[engine]}={address} ({why}); correct or unset it."
        )
    return PipelineError(
        f"data.engine={engine}: a temporary cluster on this machine did not start ({why}), perhaps "
        "because the machine is busy. Run the same command again, or set data.engine=local."
    )


@contextmanager
def _installed(data: DataConfig) -> Iterator[None]:
    try:
        yield
    except ImportError as missing:
        raise ConfigError(
            f"data.engine={data.engine}: {missing.name} is not installed; "
            f"install infini-llama[{data.engine}]."
        ) from None
