"""`infini-llama serve`: server, UI, deployments and worker of one machine in one command, which ends all of them with itself."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.errors import PipelineError
from flows.deployments import deploy
from flows.server import EXEC_WRAPPER

POLL_SECONDS = 2  # the worker asks this often for runs that are due
WORKER_STOPS_WITHIN = 60.0
log = logging.getLogger("infini_llama.serve")


def serve(files: Sequence[str], home: Path, limit: int, gpus: int | None) -> None:
    """Deploys the configurations on the server of PREFECT_API_URL and works off their runs, until it is interrupted.

    Args:
        limit: how many runs at a time.
        gpus: as `deploy` takes it.

    Raises:
        PipelineError: the worker ended by itself.
    """
    deployed = deploy(files, gpus)
    for name in deployed["deployments"]:
        log.info("deployed %s", name)
    records = home / "prefect" / "worker.log"
    records.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as workers:
        working = [workers.enter_context(_worker(pool, limit, records)) for pool in deployed["work_pools"]]
        log.info("ready; %d run(s) at a time; the worker's log is %s; Ctrl-C ends everything", limit, records)
        while all(worker.poll() is None for worker in working):
            time.sleep(0.5)
        raise PipelineError(f"the worker ended by itself; its log is {records}.")


@contextlib.contextmanager
def _worker(pool: str, limit: int, records: Path) -> Iterator[subprocess.Popen]:
    """In a session of its own: Ctrl-C of the terminal reaches only this process, which asks the worker once."""
    command = [sys.executable, str(EXEC_WRAPPER), "SIGTERM", str(os.getpid()), sys.executable, "-m", "prefect"]
    command += ["worker", "start", "--pool", pool, "--type", "process", "--limit", str(limit)]
    environment = {"PREFECT_WORKER_QUERY_SECONDS": str(POLL_SECONDS), "PYTHONSAFEPATH": "1"} | os.environ
    with records.open("ab") as output:
        worker = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield worker
    finally:
        _end(worker)


def _end(worker: subprocess.Popen) -> None:
    if worker.poll() is None:
        log.info("stopping; runs that are under way save a checkpoint")
        worker.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(WORKER_STOPS_WITHIN)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
