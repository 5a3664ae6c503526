"""torchrun on this machine: started, asked to stop, and ended with every rank it started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.train import exec_wrapper
from tasks.train.worker.status import read_statuses


def start(order_path: Path, plan: dict, grace_period: float, lock_fds: list[int]) -> "Torchrun":
    """torchrun in a session of its own, told to stop by the kernel (SIGTERM) when this process dies.

    The run's lock, the first one, travels as standard input, the one descriptor that torchrun hands on to its workers: while any
    of them lives, nobody else can take the run. The others are torchrun's, which outlives its workers.
    """
    command = [sys.executable, exec_wrapper.__file__, "SIGTERM", str(os.getpid())]
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
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=lock_fds[0],
            pass_fds=lock_fds[1:],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Torchrun(process, order_path.parent, plan["nproc_per_node"])


def meeting(port: int | str) -> list[str]:
    """Where the workers find each other: at a port of this machine, or at a free one of torchrun's choice (auto)."""
    return ["--standalone"] if port == "auto" else ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={port}"]


@dataclass(frozen=True)
class Torchrun:
    """torchrun with its ranks.

    Args:
        attempt_dir: where the ranks write.
        processes: how many there are.
    """

    process: subprocess.Popen
    attempt_dir: Path
    processes: int

    def poll(self) -> int | None:
        return self.process.poll()

    def ask_to_stop(self, grace_period: float) -> None:
        statuses = read_statuses(self.attempt_dir, self.processes)
        pids = [status["pid"] for status in statuses if status and status["state"] == "running"]
        for pid in pids:
            _send(pid, signal.SIGTERM)
        if not pids:  # no rank is up yet: there is nothing to save
            _send(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(grace_period)
        except subprocess.TimeoutExpired:
            self.end()

    def end(self) -> None:
        """The kernel kills the ranks with torchrun; slow ones are helped along."""
        _send(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for status in read_statuses(self.attempt_dir, self.processes):
            while status and _is_rank(status["pid"], self.attempt_dir):
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
