"""The units of a plan on the machines of a Dask or Ray cluster: this process hands them out, writes the journal, and survives lost workers.

A remote worker sees home through a shared filesystem. It writes each shard under a name of its own and renames it into the
build, so that a worker that was given up for lost and lives cannot tear what its successor wrote: both write the same bytes.
"""

import os
import platform
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.tokens.journal import Journal, JournalEntry, entry_of
from infini_llama.tasks.preprocess.tokens.plan import Plan, Unit, shares_of

SHARE = (
    8  # units at most that one worker does on end: more read on in the same files, fewer are done again after a loss
)
SHARES_EACH = 4  # for each of the workers at least, that they end together
AHEAD = 4  # shares handed out beyond one a worker
ANSWERS_WITHIN = 10.0  # seconds
LOSSES = 3  # workers that may die of one share before the build gives up

Work = Callable[[Plan, list[Unit], Path, Path, Callable[[str, str, int, int], None]], None]
Answer = tuple[list[JournalEntry], str]


@dataclass(frozen=True)
class Share:
    """What a remote worker is told, beside the plan: which units, the build's folder, and what must be the same there as here."""

    units: list[Unit]
    work: Path
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """What decides the bytes that a worker writes."""
    packages = {name: version(name) for name in ("infini-llama", "tokenizers", "pyarrow", "numpy")}
    return packages | {"python": platform.python_version()}


def do_share(do: Work, plan: Plan, share: Share) -> Answer:
    """On the remote worker: writes the shards of a share; returns their journal entries, and who did it.

    Raises:
        PipelineError: this machine has other versions, or does not see the build's folder.
    """
    here = f"{socket.gethostname()}, process {os.getpid()}"
    if differing := [
        f"{name} {versions()[name]}, not {other}" for name, other in share.versions.items() if versions()[name] != other
    ]:
        raise PipelineError(f"the worker on {here} has {', '.join(differing)}; install the same there as here.")
    if not (share.work / "tokenizer.json").is_file():
        raise PipelineError(
            f"the worker on {here} cannot access {share.work}; runtime.home must be on a filesystem that all "
            "machines share."
        )
    own = parts_of(share.work) / f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    entries: list[JournalEntry] = []

    def finish(name: str, key: str, documents: int, tokens: int) -> None:
        entries.append(entry_of(own / name, name, key, documents, tokens))
        (share.work / name).parent.mkdir(exist_ok=True)
        (own / name).replace(share.work / name)

    try:
        do(plan, share.units, share.work, own, finish)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return entries, here


def parts_of(work: Path) -> Path:
    """Where remote workers write, beside the build's folder: what a killed one leaves is no part of the artifact."""
    return work.with_name(f"{work.name}-parts")


def do_on_cluster(
    do: Work, plan: Plan, units: list[Unit], journal: Journal, data: DataConfig, log_progress: Callable[[], None]
) -> None:
    """Writes the shard of every unit by the engine `data.engine`, noting each in the journal as it is reported.

    Raises:
        ConfigError: the engine is not installed, or its cluster does not answer.
        PipelineError: a share killed one worker after another; what is done is kept.
    """
    _refuse_silent(data)
    shutil.rmtree(parts_of(journal.work), ignore_errors=True)
    most = max(1, min(SHARE, len(units) // (SHARES_EACH * data.num_workers)))
    shares = [Share(some, journal.work, versions()) for some in shares_of(units, most)]
    try:
        for entries, _ in ENGINES[data.engine](do, plan, shares, data):
            for entry in entries:
                journal.append(entry)
            log_progress()
    except ImportError as missing:
        raise ConfigError(
            f"data.engine={data.engine}: {missing.name} is not installed; install infini-llama[{data.engine}]."
        ) from None
    finally:
        shutil.rmtree(parts_of(journal.work), ignore_errors=True)


def _refuse_silent(data: DataConfig) -> None:
    """A cluster that is not there is named within seconds; Ray would try for minutes."""
    place = re.fullmatch(r"(?:\w+://)?([^:/]+):(\d+)", data.engine_address or "")
    if place is None:
        return
    try:
        socket.create_connection((place[1], int(place[2])), timeout=ANSWERS_WITHIN).close()
    except OSError as fault:
        raise ConfigError(
            f"data.engine_address={data.engine_address}: no {data.engine.capitalize()} cluster answers there ({fault})."
        ) from None


def _lost(share: Share, engine: str) -> PipelineError:
    names = f"{share.units[0].file} to {share.units[-1].file}"
    return PipelineError(
        f"{LOSSES} or more {engine} workers died of the shards {names}, perhaps for lack of memory. Finished shards "
        "are kept: run the same command again, with more memory per worker or a smaller data.shard_size."
    )


def over_dask(do: Work, plan: Plan, shares: list[Share], data: DataConfig) -> Iterator[Answer]:
    """Each share's answer as it comes, from the cluster of `data.engine_address` or one started on this machine."""
    dask, distributed = import_module("dask"), import_module("distributed")

    with (
        dask.config.set({"distributed.scheduler.allowed-failures": LOSSES - 1}),
        _dask_cluster(distributed.LocalCluster, data) as address,
    ):
        try:
            client = distributed.Client(address, timeout=30, set_as_default=False)
        except OSError as fault:
            raise ConfigError(
                f"data.engine_address={data.engine_address}: no Dask scheduler answers there ({fault})."
            ) from None
        with client:
            whole = client.scatter(plan, broadcast=False, hash=False)
            waiting = iter(shares)
            ahead = max(len(client.scheduler_info(n_workers=-1)["workers"]), data.num_workers) + AHEAD
            submitted = {}

            def submit(share: Share) -> Any:
                future = client.submit(do_share, do, whole, share, pure=False)
                submitted[future.key] = share
                return future

            running = distributed.as_completed([submit(share) for share in islice(waiting, ahead)], loop=client.loop)
            for future in running:
                try:
                    answer = future.result()
                except distributed.KilledWorker:
                    raise _lost(submitted[future.key], "Dask") from None
                if (following := next(waiting, None)) is not None:
                    running.add(submit(following))
                del submitted[future.key]
                yield answer


@contextmanager
def _dask_cluster(local: Any, data: DataConfig) -> Iterator[str]:
    if data.engine_address:
        yield data.engine_address
        return
    with local(n_workers=data.num_workers, threads_per_worker=1, dashboard_address=None, host="127.0.0.1") as cluster:
        yield cluster.scheduler_address


def over_ray(do: Work, plan: Plan, shares: list[Share], data: DataConfig) -> Iterator[Answer]:
    """Each share's answer as it comes, from the cluster of `data.engine_address` or one started on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = import_module("ray")
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
        raise ConfigError(
            f"data.engine_address={data.engine_address}: no Ray cluster answers there ({fault})."
        ) from None
    with context:
        remote = ray.remote(max_retries=LOSSES - 1, num_cpus=1)(do_share)
        whole, waiting, running = ray.put(plan), iter(shares), {}
        ahead = int(ray.cluster_resources().get("CPU", 1)) + AHEAD
        for share in islice(waiting, ahead):
            running[remote.remote(do, whole, share)] = share
        while running:
            (done,), _ = ray.wait([*running], num_returns=1)
            share = running.pop(done)
            try:
                answer = ray.get(done)
            except ray.exceptions.WorkerCrashedError:
                raise _lost(share, "Ray") from None
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            if (following := next(waiting, None)) is not None:
                running[remote.remote(do, whole, following)] = following
            yield answer


ENGINES = {"dask": over_dask, "ray": over_ray}
