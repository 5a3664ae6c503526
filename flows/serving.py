"""`infini-llama serve`: server, UI, deployments and worker of one machine in one command.

All of them end with it.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling
from prefect.workers.process import ProcessWorker

from infini_llama.configs.errors import ConfigError
from infini_llama.flows.deployments import Deployment, deploy
from infini_llama.flows.executions import FOLDER, folder_of
from infini_llama.flows.lost_runs import LostRuns, correct_states, flow_processes
from infini_llama.flows.settings import WORKER
from infini_llama.flows.workarounds.server import Server
from infini_llama.tasks.runs import exec_wrapper
from infini_llama.tasks.train.processes import send

POLL_SECONDS = 2  # poll interval of the worker
STOP_SECONDS = 45.0  # that the runs have to save a checkpoint and end
RESTART_SECONDS = 5
CHECK_SECONDS = 15  # between two looks at the states of all runs
log = logging.getLogger("infini_llama.serve")


def serve(
    deployments: Sequence[Deployment],
    home: Path,
    limit: int,
    gpus: int | None,
    server: Server | None,
) -> None:
    """Deploy the configurations on the server of PREFECT_API_URL and execute their runs.

    It goes on until it is interrupted. A worker that exits is restarted; its runs are separate
    processes and continue.

    Args:
        limit: maximum number of runs of a work pool at the same time.
        gpus: as in `deploy`.
        server: started by this process; it is restarted if it ends.

    Raises:
        ConfigError: a work pool starts no processes.
        PipelineError: the server ended and does not come up again.
    """
    # A shell ignores the signal for commands in its background. The worker stops by it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[FOLDER] = str(folder_of(home).absolute())
    lost = LostRuns(Path(os.environ[FOLDER]))
    correct_states(lost, at_once=True)
    deployed = deploy(deployments, gpus)
    for name in deployed["deployments"]:
        log.info("deployed %s", name)
    for pool in deployed["work_pools"]:
        _require_processes(pool)
    worker_log = home / "prefect" / "worker.log"
    worker_log.parent.mkdir(parents=True, exist_ok=True)
    # In the environment of the workers and their runs.
    mark = f"INFINI_LLAMA_SERVED_BY={os.getpid()}-{time.time_ns()}"
    workers: dict[str, subprocess.Popen] = {}
    try:
        while True:
            for pool in deployed["work_pools"]:
                if pool not in workers or workers[pool].poll() is not None:
                    workers[pool] = _start_worker(pool, limit, worker_log, mark)
            log.info(
                "ready; %d run(s) of a work pool at a time; the worker's log is %s; "
                "press Ctrl-C to stop everything",
                limit,
                worker_log,
            )
            _watch(workers, server, lost)
            log.warning(
                "a worker exited; its runs continue, and another worker starts in %d s",
                RESTART_SECONDS,
            )
            time.sleep(RESTART_SECONDS)
    finally:
        _stop(list(workers.values()), mark)


def _watch(
    workers: dict[str, subprocess.Popen], server: Server | None, lost: LostRuns
) -> None:
    """Return when a worker has ended.

    Meanwhile, restart the server if it ends, and correct the states of runs.
    """
    check_at = 0.0
    while all(worker.poll() is None for worker in workers.values()):
        if server is not None and server.has_ended():
            server.restart()
            log.info("the Prefect server is up again")
        if time.monotonic() >= check_at:
            check_at = time.monotonic() + CHECK_SECONDS
            correct_states(lost)
        time.sleep(0.5)


def _require_processes(pool: str) -> None:
    """Refuse a pool whose worker is another program, such as that of Kubernetes."""
    with get_client(sync_client=True) as client:
        kind = client.read_work_pool(pool).type
    if kind != ProcessWorker.type:
        raise ConfigError(
            f"the work pool {pool} is of type {kind}, and serve starts processes; start its worker "
            f"with 'prefect worker start --pool {pool}', or name another deployment.work_pool."
        )


def _start_worker(
    pool: str, limit: int, worker_log: Path, mark: str
) -> subprocess.Popen:
    """Start a worker in a session of its own.

    So Ctrl-C of the terminal reaches only this process, which stops the worker once.
    """
    command = [sys.executable, exec_wrapper.__file__, "SIGTERM", str(os.getpid())]
    command += [sys.executable, "-m", "infini_llama.flows.workarounds.worker"]
    command += [
        "worker",
        "start",
        "--pool",
        pool,
        "--type",
        "process",
        "--limit",
        str(limit),
    ]
    name, value = mark.split("=")
    defaults = WORKER | {"PREFECT_WORKER_QUERY_SECONDS": str(POLL_SECONDS)}
    environment = defaults | os.environ | {name: value}
    with worker_log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _stop(workers: list[subprocess.Popen], mark: str) -> None:
    """Cancel the runs, end the workers, and signal the runs of workers that were killed.

    No process is left.
    """
    try:
        _cancel(set(flow_processes(mark).values()))
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        _signal_runs(mark, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and (
            flow_processes(mark) or any(worker.poll() is None for worker in workers)
        ):
            time.sleep(0.2)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        _signal_runs(mark, signal.SIGKILL)


def _signal_runs(mark: str, number: signal.Signals) -> None:
    for process in flow_processes(mark):
        send(process, number)


def _cancel(runs: set[UUID]) -> None:
    """Cancel these runs and wait for them.

    A worker of Prefect 3.9.1 that is stopped ends its runs too, but leaves them Running
    (PrefectHQ/prefect#16746 and PrefectHQ/prefect#22528, open).
    """
    if not runs:
        return
    try:
        with get_client(sync_client=True) as client:
            # The process of a finished run may not have ended.
            runs = {run for run in runs if not _is_over(client, run)}
            if not runs:
                return
            log.info(
                "stopping; %d run(s) are asked to save a checkpoint and to end",
                len(runs),
            )
            for run in runs:
                client.set_flow_run_state(
                    run, Cancelling(message="infini-llama serve was stopped.")
                )
            deadline = time.monotonic() + STOP_SECONDS
            while time.monotonic() < deadline and not all(
                _is_over(client, run) for run in runs
            ):
                time.sleep(0.5)
    except (HTTPError, ObjectNotFound, RuntimeError) as fault:
        # The server or a run is gone: the worker is stopped all the same.
        log.warning("the runs cannot be cancelled (%s)", fault)


def _is_over(client: SyncPrefectClient, run: UUID) -> bool:
    """Whether a run has ended, or was deleted."""
    filtered = FlowRunFilter.model_validate({"id": {"any_": [run]}})
    found = client.read_flow_runs(flow_run_filter=filtered)
    return all(each.state is None or each.state.is_final() for each in found)
