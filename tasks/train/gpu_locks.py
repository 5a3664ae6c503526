"""One run at a time on a GPU of this machine, whoever started it: a lock that the kernel frees with its holder."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.storage.locks import Busy, Lock

SAY_AGAIN = 60.0  # seconds between two lines about the same wait
log = logging.getLogger("infini_llama.train")


def gpus_of(facts: MachineFacts, plan: EnvironmentPlan) -> list[str]:
    """Identities of the GPUs that the plan names, in one order for all runs; [] on a CPU."""
    if plan.device != "cuda":
        return []
    return sorted(facts.gpus[number].uuid or f"number-{number}" for number in plan.gpus)


@contextlib.contextmanager
def locked(gpus: list[str], each_wait: Callable[[], None], folder: Path | None = None) -> Generator[list[Lock]]:
    """Inside, no other run of this user computes on these GPUs; waits for one that does.

    Args:
        gpus: of `gpus_of`; the same order everywhere, so that two runs never wait for each other.
        each_wait: called every second of a wait; what it raises ends the wait.
        folder: of the locks, the same for all runs of the machine.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"infini-llama-{os.getuid()}"
    with contextlib.ExitStack() as locks:
        yield [_take(locks, folder / f"gpu-{gpu}.lock", each_wait) for gpu in gpus]


def _take(locks: contextlib.ExitStack, path: Path, each_wait: Callable[[], None]) -> Lock:
    seconds = 0.0
    while True:
        try:
            return locks.enter_context(Lock(path, wait=1.0))
        except Busy as other:
            if seconds % SAY_AGAIN == 0:
                log.warning("waiting for a GPU: %s", other)
            seconds += 1
            each_wait()
