"""`infini-llama serve`: server, UI, deployments and worker of one machine in one command; all of them end with it."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.states import Cancelling

from infini_llama.flows.deployments import Offer, deploy
from infini_llama.flows.lost_runs import LostRuns
from infini_llama.flows.server import EXEC_WRAPPER, Server
from infini_llama.flows.settings import WORKER

POLL_SECONDS = 2  # poll interval of the worker
STOPS_WITHIN = 45.0
RESTART_SECONDS = 5
CHECK_SECONDS = 15  # between two looks for runs without a process
MARK = "INFINI_LLAMA_SERVED_BY"
log = logging.getLogger("infini_llama.serve")


def serve(offers: Sequence[Offer], home: Path, limit: int, gpus: int | None, server: Server | None) -> None:
    """Deploy the configurations on the server of PREFECT_API_URL and execute their runs, until interrupted.

    Args:
        server: started by this process; it is started again if it ends.
        limit: maximum number of runs at the same time.
        gpus: as `deploy` takes it.

    A worker that exits is restarted; its runs are separate processes and continue.

    Raises:
        PipelineError: the server ended and does not come up again.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell; the worker stops by it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    deployed = deploy(offers, gpus)
    for name in deployed["deployments"]:
        log.info("deployed %s", name)
    records = home / "prefect" / "worker.log"
    records.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{os.getpid()}-{time.time_ns()}"
    workers: dict[str, subprocess.Popen] = {}
    try:
        while True:
            for pool in deployed["work_pools"]:
                if pool not in workers or workers[pool].poll() is not None:
                    workers[pool] = _worker(pool, limit, records, mark)
            log.info(
                "ready; %d run(s) at a time; the worker's log is %s; press Ctrl-C to stop everything", limit, records
            )
            _watch(workers, server)
            log.warning("a worker exited; its runs continue, and another worker starts in %d s", RESTART_SECONDS)
            time.sleep(RESTART_SECONDS)
    finally:
        _end(list(workers.values()), mark)


def _watch(workers: dict[str, subprocess.Popen], server: Server | None) -> None:
    """Return when a worker has ended. Meanwhile, restart the server if it ends, and mark runs that lost their process."""
    lost, check_at = LostRuns(), 0.0
    while all(worker.poll() is None for worker in workers.values()):
        if server is not None and server.has_ended():
            server.restart()
            log.info("the Prefect server is up again")
        if server is not None and server.is_local and time.monotonic() >= check_at:
            check_at = time.monotonic() + CHECK_SECONDS
            try:
                with get_client(sync_client=True) as client:
                    lost.mark(client)
            except (HTTPError, RuntimeError) as fault:  # the server is busy or has just ended
                log.debug("the state of the runs cannot be checked (%s)", fault)
        time.sleep(0.5)


def _worker(pool: str, limit: int, records: Path, mark: str) -> subprocess.Popen:
    """In a session of its own: Ctrl-C of the terminal reaches only this process, which asks the worker once."""
    worker = ["worker", "start", "--pool", pool, "--type", "process", "--limit", str(limit)]
    command = [sys.executable, str(EXEC_WRAPPER), "SIGTERM", str(os.getpid())]
    command += [sys.executable, "-m", "infini_llama.flows.worker", *worker]
    environment = WORKER | {"PREFECT_WORKER_QUERY_SECONDS": str(POLL_SECONDS)} | os.environ | {MARK: mark}
    with records.open("ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _end(workers: list[subprocess.Popen], mark: str) -> None:
    """Cancels the runs, then ends the workers; a run of a worker that is gone is asked by a signal. Nothing is left."""
    try:
        _cancel(set(_runs(mark).values()))
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        _signal(mark, signal.SIGTERM)
        deadline = time.monotonic() + STOPS_WITHIN
        while time.monotonic() < deadline and (_runs(mark) or any(worker.poll() is None for worker in workers)):
            time.sleep(0.2)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        _signal(mark, signal.SIGKILL)


def _signal(mark: str, number: signal.Signals) -> None:
    for process in _runs(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _cancel(runs: set[str]) -> None:
    """Cancels these runs and waits for them: a worker that is stopped ends its runs too, but leaves them Running for ever."""
    if not runs:
        return
    log.info("stopping; %d run(s) save a checkpoint and are cancelled", len(runs))
    try:
        with get_client(sync_client=True) as client:
            for run in runs:
                client.set_flow_run_state(UUID(run), Cancelling(message="infini-llama serve was stopped."))
            deadline = time.monotonic() + STOPS_WITHIN
            while time.monotonic() < deadline and any(_is_under_way(client, run) for run in runs):
                time.sleep(0.5)
    except (HTTPError, RuntimeError) as fault:  # the server is gone: the worker is stopped all the same
        log.warning("the runs cannot be cancelled (%s)", fault)


def _is_under_way(client: SyncPrefectClient, run: str) -> bool:
    state = client.read_flow_run(UUID(run)).state
    return state is not None and not state.is_final()


def _runs(mark: str) -> dict[int, str]:
    """Processes of flow runs, which inherit the worker's mark, each with the id of its run."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to another user
            environment = (process / "environ").read_bytes()
            run = re.search(rb"PREFECT__FLOW_RUN_ID=([0-9a-f-]{36})", environment)
            if run and f"{MARK}={mark}".encode() in environment:
                found[int(process.name)] = run[1].decode()
    return found
