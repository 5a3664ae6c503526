"""Training on several nodes: the others join each attempt of node 0 by torchrun's c10d rendezvous.

The nodes share the run's folder. Node 0 writes rendezvous.json into the folder of each attempt; the
others read it.

Run as `python -m infini_llama.tasks.train.nodes ATTEMPT_DIR`, which is what a launcher starts on
each node, this becomes torchrun.
"""

import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from infini_llama.configs.errors import PipelineError, Preempted
from infini_llama.configs.reading import changed
from infini_llama.configs.secrets import MASK
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.status import Endpoint
from infini_llama.tasks.runs.exec_wrapper import LAUNCHER
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    attempt_folders,
    attempt_plan_path,
    is_retried,
    number_of,
    read_attempt_plan,
    read_attempts,
)
from infini_llama.tasks.train.attempt import what_follows
from infini_llama.tasks.train.launch import (
    WORKERS,
    TorchrunWorkers,
    spawn,
    torchrun_command,
    torchrun_environment,
)
from infini_llama.tasks.train.outcome import Evidence, outcome_of
from infini_llama.tasks.train.rendezvous import (
    JOIN_TIMEOUT,
    await_endpoint,
    gloo_interface,
    host_rendezvous,
    read_endpoint,
)
from infini_llama.tasks.train.stopping import grace_period

POLL_SECONDS = 0.5
CONNECT_SECONDS = 3.0
log = logging.getLogger("infini_llama.nodes")


def node_environment(plan: EnvironmentPlan, endpoint: Endpoint) -> dict[str, str]:
    """The workers' variables on a node that reads the plan from the attempt's folder.

    There, possible secrets are masked: they come from this machine's own environment.
    """
    hidden = [name for name, value in plan.env.items() if value == MASK]
    missing = [name for name in hidden if name not in os.environ]
    if missing:
        log.warning(
            "the value of environment.env.%s is not stored, because it may be a secret; "
            "set it on this machine too",
            ", ".join(missing),
        )
    stored = {name: value for name, value in plan.env.items() if name not in hidden}
    return gloo_interface(endpoint) | stored


def join(
    run: RunFolder, master_addr: str | None = None, timeout: float = JOIN_TIMEOUT
) -> int:
    """Take part in one attempt after the other until the supervisor has ended the run.

    The supervisor is the command on node 0. This function waits while another attempt may follow
    (`_continues`).

    Args:
        master_addr: address of node 0 as seen from here; None: as node 0 has recorded it.
        timeout: seconds to wait for a supervisor, and for its next attempt.

    Returns:
        the exit code of the last attempt.

    Raises:
        PipelineError: there was no supervisor.
        Preempted: this process was asked to stop; its ranks have saved a checkpoint, unless the
            grace period ended first.
    """
    taken: set[Path] = set()
    ended_before = len(read_attempts(run))  # by an earlier command, perhaps
    was_supervised = False
    since = time.monotonic()
    while True:
        # The supervisor removes it when it ends, unless it is killed.
        is_supervised = run.lease.exists()
        newest = _open_attempt(run)
        ends = read_attempts(run)
        last = ends[-1].code if ends else None
        endpoint = read_endpoint(newest) if newest and newest not in taken else None
        if newest and endpoint:
            endpoint = changed(endpoint, address=master_addr or endpoint.address)
            if _is_reachable(endpoint, since):
                taken.add(newest)
                code = join_attempt(newest, endpoint)
                log.info("%s exited with %d on this node", newest.name, code)
                since = time.monotonic()
                was_supervised = True
        elif last is not None and was_supervised and not newest:
            # Before its first attempt, a supervisor verifies the checkpoint.
            has_ended = len(ends) > ended_before or not is_supervised
            if has_ended and not _continues(run, last, is_supervised):
                return last
        if time.monotonic() - since > timeout:
            if last is None:
                raise PipelineError(
                    f"no command has supervised the run {run.path} for {timeout:.0f} s, "
                    "or node 0 cannot be reached; start it on node 0."
                )
            return last
        was_supervised |= is_supervised
        time.sleep(POLL_SECONDS)


def _continues(run: RunFolder, code: int, is_supervised: bool) -> bool:
    """Whether another attempt may follow the last one, which ended with this exit code."""
    following = what_follows(code)
    if following.is_nothing:
        return False
    # In the delay before a retry, the supervisor holds no lease.
    return is_supervised or (following.is_retried and is_retried(run))


def _open_attempt(run: RunFolder) -> Path | None:
    """The newest attempt, if its end is not on record."""
    folders = [
        folder for folder in attempt_folders(run) if attempt_plan_path(folder).exists()
    ]
    recorded = {record.attempt for record in read_attempts(run)}
    is_open = bool(folders) and number_of(folders[-1]) not in recorded
    return folders[-1] if is_open else None


def _is_reachable(endpoint: Endpoint, since: float) -> bool:
    """Whether node 0's torchrun accepts connections.

    After half a minute without one, the reason is logged.
    """
    try:
        with socket.create_connection(
            (endpoint.address, endpoint.port), timeout=CONNECT_SECONDS
        ):
            return True
    except OSError as fault:
        seconds = time.monotonic() - since
        if seconds > 30 and seconds % 30 < CONNECT_SECONDS + POLL_SECONDS:
            log.warning(
                "this node cannot reach node 0 (%s) at %s:%d: %s; "
                "allow TCP to all ports above 1023 of both machines, or set MASTER_ADDR",
                endpoint.host,
                endpoint.address,
                endpoint.port,
                fault,
            )
        return False


def join_attempt(attempt_dir: Path, endpoint: Endpoint) -> int:
    """Run this node's workers of one attempt.

    Returns:
        an exit code.

    Raises:
        Preempted: this process was asked to stop.
    """
    attempt = read_attempt_plan(attempt_dir)
    run = RunFolder(attempt_dir.parents[1])
    command = torchrun_command(attempt_dir, attempt.plan, endpoint, is_host=False)
    output = attempt_dir / f"torchrun-{socket.gethostname()}-{os.getpid()}.log"
    variables = node_environment(attempt.plan, endpoint)
    environment = torchrun_environment(variables)
    process = spawn(command, output, environment, lock_fds=[])
    workers = TorchrunWorkers(
        process, attempt_dir, attempt.plan.world_size, attempt.plan.nnodes
    )
    try:
        while workers.poll() is None and _open_attempt(run) == attempt_dir:
            workers.wait(POLL_SECONDS)
    except BaseException as requested:
        workers.request_stop()
        grace = grace_period(run, attempt.config.runtime)
        log.warning("stop requested; waiting up to %.0f s for a checkpoint", grace)
        workers.end_within(grace)
        raise Preempted(
            "this node received a stop signal and its workers have ended; "
            "run the same command to rejoin."
        ) from requested
    finally:
        workers.end()
    statuses = list(workers.statuses()) or [None]
    return outcome_of(Evidence(process.wait(), statuses, str(attempt_dir))).code


def become_torchrun(attempt_dir: Path) -> NoReturn:
    """Replace this process, which a launcher has started on a node, by torchrun.

    The node of rank 0 hosts the rendezvous.

    Raises:
        PipelineError: the node that hosts does not start within JOIN_TIMEOUT.
    """
    attempt = read_attempt_plan(attempt_dir)
    plan = attempt.plan
    launcher = attempt.config.environment.started_by
    is_host = os.environ.get(launcher.node_rank, "0") == "0"
    if is_host:
        WORKERS[launcher.name].record_job(attempt_dir)
    endpoint = (
        host_rendezvous(attempt_dir, plan) if is_host else await_endpoint(attempt_dir)
    )
    command = torchrun_command(attempt_dir, plan, endpoint, is_host)
    environment = torchrun_environment(node_environment(plan, endpoint))
    environment[LAUNCHER] = str(os.getpid())
    # It is for the ranks, which install a handler; torchrun would end.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.execve(command[0], command, environment)


def main() -> int:
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    try:
        become_torchrun(Path(sys.argv[1]))
    except PipelineError as fault:
        log.error("%s", fault)
        return fault.exit_code


if __name__ == "__main__":
    sys.exit(main())
