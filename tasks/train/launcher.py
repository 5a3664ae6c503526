"""Starts torchrun, watches it, and ends it with every rank it started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tasks.train.worker.status import read_status

POLL_SECONDS = 0.2


def start(order_path: Path, plan: dict, grace_period: float, lock_fds: list[int]) -> subprocess.Popen:
    """torchrun in a session of its own, told to stop by the kernel (SIGTERM) when this process dies.

    The run's lock, the first one, travels as standard input, the one descriptor that torchrun hands on to its workers: while any
    of them lives, nobody else can take the run. The others are torchrun's, which outlives its workers.
    """
    wrapper = Path(__file__).with_name("exec_wrapper.py")
    command = [sys.executable, str(wrapper), "SIGTERM", str(os.getpid())]
    command += [sys.executable, "-m", "torch.distributed.run", *meeting(plan["port"]), "--max-restarts=0"]
    command += [f"--nproc-per-node={plan['nproc_per_node']}", "--module", "tasks.train.worker", str(order_path)]
    environment = (
        os.environ
        | plan["env"]
        | {
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(grace_period)),
            "PYTHONSAFEPATH": "1",  # a folder named tasks/ where the user stands must not shadow ours
        }
    )
    with (order_path.parent / "torchrun.log").open("ab") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=lock_fds[0],
            pass_fds=lock_fds[1:],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def meeting(port: int | str) -> list[str]:
    """Where the workers find each other: at a port of this machine, or at a free one of torchrun's choice (auto)."""
    return ["--standalone"] if port == "auto" else ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={port}"]


def watch(process: subprocess.Popen, each_poll: Callable[[], None]) -> int:
    """Waits for torchrun's end, calling `each_poll` a few times a second; returns its exit code."""
    while (code := process.poll()) is None:
        each_poll()
        time.sleep(POLL_SECONDS)
    each_poll()
    return code


def read_statuses(attempt_dir: Path, processes: int) -> list[dict | None]:
    """Each rank's last word; None for a rank that never wrote one."""
    return [read_status(attempt_dir, rank) for rank in range(processes)]


def ask_to_stop(process: subprocess.Popen, attempt_dir: Path, processes: int, grace_period: float) -> None:
    """SIGTERM to every rank, which then saves at the next step boundary; after the grace period everything is killed."""
    pids = [
        status["pid"] for status in read_statuses(attempt_dir, processes) if status and status["state"] == "running"
    ]
    for pid in pids:
        _send(pid, signal.SIGTERM)
    if not pids:  # no rank is up yet: there is nothing to save
        _send(process.pid, signal.SIGTERM)
    try:
        process.wait(grace_period)
    except subprocess.TimeoutExpired:
        end(process, attempt_dir, processes)


def end(process: subprocess.Popen, attempt_dir: Path, processes: int) -> None:
    """Kills torchrun and waits until no rank is left (the kernel kills the ranks with it; slow ones are helped along)."""
    _send(process.pid, signal.SIGKILL)
    process.wait()
    for status in read_statuses(attempt_dir, processes):
        while status and _is_rank(status["pid"], attempt_dir):
            _send(status["pid"], signal.SIGKILL)
            time.sleep(0.02)


def _is_rank(pid: int, attempt_dir: Path) -> bool:
    """Whether `pid` is still that worker, not another process that was given its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return str(attempt_dir).encode() in command


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
