"""Locks of a run and of its GPUs, against other commands."""

import logging
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from infini_llama.configs.errors import TrainFailed, disk_full_as
from infini_llama.configs.schema import EnvironmentConfig, RuntimeConfig
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.locks import Busy, Lease, Lock
from infini_llama.tasks.train.stopping import grace_period

log = logging.getLogger("infini_llama.train")
LOG_AGAIN_SECONDS = 60.0  # seconds between two lines about the same wait


@dataclass(frozen=True)
class LockedRun:
    """A run that no other command trains meanwhile.

    Attributes:
        locks: of the run and of its GPUs; torchrun holds them as long as it runs.
        poll: called a few times per second; an Exception that it raises is a failure, anything else
            a request to stop.
    """

    locks: tuple[Lock, ...]
    poll: Callable[[], None]


@contextmanager
def hold_run(
    run: RunFolder, runtime: RuntimeConfig, each_poll: Callable[[], None]
) -> Generator[LockedRun]:
    """Lock the run against other commands, on this machine (the lock) or on another (the lease).

    `poll` raises Busy once either is lost.

    Raises:
        Busy: another one does.
        TrainFailed: the disk is full.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    with (
        disk_full_as(f"the run in {run.path}", TrainFailed),
        Lock(run.lock, wait=grace_period(run, runtime) + 5) as lock,
        Lease(run.lease) as lease,
    ):

        def poll() -> None:
            lock.check()
            lease.check()
            each_poll()

        yield LockedRun((lock,), poll)


def local_gpus(
    environment: EnvironmentConfig, plan: EnvironmentPlan
) -> tuple[int, ...]:
    """Numbers of this machine's GPUs that the workers use."""
    return plan.gpus if environment.started_by.has_local_workers else ()


def identities(facts: MachineFacts, gpus: tuple[int, ...]) -> list[str]:
    """Identities of the GPUs of these numbers, in one order for all runs."""
    return sorted(facts.gpus[number].uuid or f"number-{number}" for number in gpus)


@contextmanager
def hold_gpus(
    gpus: list[str], each_wait: Callable[[], None], folder: Path | None = None
) -> Generator[list[Lock]]:
    """Lock these GPUs against other runs of this user, and wait for one that computes on them.

    Args:
        gpus: of `identities`; the same order everywhere, so that two runs never wait for each
            other.
        each_wait: called every second of a wait; what it raises ends the wait.
        folder: of the locks, the same for all runs of the machine.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"infini-llama-{os.getuid()}"
    with ExitStack() as locks:
        yield [_hold_gpu(locks, folder / f"gpu-{gpu}.lock", each_wait) for gpu in gpus]


def _hold_gpu(locks: ExitStack, path: Path, each_wait: Callable[[], None]) -> Lock:
    seconds = 0.0
    while True:
        try:
            return locks.enter_context(Lock(path, wait=1.0, setting="TMPDIR"))
        except Busy as other:
            if seconds % LOG_AGAIN_SECONDS == 0:
                log.warning("waiting for a GPU: %s", other)
            seconds += 1
            each_wait()
