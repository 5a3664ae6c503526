"""torchrun on this machine: started, asked to stop, and ended with every rank it started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from infini_llama.tasks.runs.status import is_here, read_statuses
from infini_llama.tasks.train import exec_wrapper


def start(order_path: Path, plan: dict, grace_period: float, lock_fds: list[int]) -> "Torchrun":
    """torchrun, or the agent of the first of several nodes, which meets the others and then starts it."""
    if plan["nnodes"] > 1:
        command = [sys.executable, "-m", "infini_llama.tasks.clusters.node", str(order_path.parent), "--node-rank=0"]
    else:
        command = torchrun(order_path, plan, meeting(plan["port"]))
    log = order_path.with_name("torchrun.log")
    process = spawn(command, log, plan["env"], grace_period, lock_fds, new_session=True)
    return Torchrun(process, order_path.parent, plan["nproc_per_node"] * plan["nnodes"])


def torchrun(order_path: Path, plan: dict, meeting: list[str]) -> list[str]:
    """The command that starts this machine's workers for the attempt of an order."""
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--max-restarts=0"]
    command.append(f"--log-dir={os.devnull}")  # else it leaves a folder in TMPDIR; each rank has a log of its own
    return [
        *command,
        f"--nproc-per-node={plan['nproc_per_node']}",
        "--module",
        "infini_llama.tasks.train.worker",
        str(order_path),
    ]


def spawn(
    command: list[str], log: Path, env: dict[str, str], grace_period: float, lock_fds: list[int], new_session: bool
) -> subprocess.Popen:
    """A command that the kernel tells to stop (SIGTERM) when this process dies.

    Args:
        env: on top of this process's own.
        lock_fds: the run's lock, the first one, travels as standard input, the one descriptor that torchrun hands on to its workers:
            while any of them lives, nobody else can take the run. The others are torchrun's, which outlives its workers.
        new_session: so that no terminal's Ctrl-C reaches it.
    """
    environment = (
        os.environ
        | env
        | {
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(grace_period)),
            "PYTHONSAFEPATH": "1",  # a folder named tasks/ where the user stands must not shadow ours
        }
    )
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, exec_wrapper.__file__, "SIGTERM", str(os.getpid()), *command],
            env=environment,
            stdin=lock_fds[0] if lock_fds else subprocess.DEVNULL,
            pass_fds=lock_fds[1:],
            stdout=output,
            stderr=output,
            start_new_session=new_session,
        )


def meeting(port: int | str) -> list[str]:
    """Where the workers find each other: at a port of this machine, or at a free one of torchrun's choice (auto)."""
    return ["--standalone"] if port == "auto" else ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={port}"]


@dataclass(frozen=True)
class Torchrun:
    """torchrun with its ranks; those of other nodes are ended by these.

    Args:
        process: torchrun, or the agent that has it as a child.
        attempt_dir: where the ranks write.
        processes: how many there are, over all nodes.
        node: which of the nodes this one is.
    """

    process: subprocess.Popen
    attempt_dir: Path
    processes: int
    node: int = 0
    outlives: bool = False

    def poll(self) -> int | None:
        return self.process.poll()

    def ask_to_stop(self, grace_period: float) -> None:
        pids = self.running()
        for pid in pids:
            send(pid, signal.SIGTERM)
        if not pids:  # no rank is up: there is nothing to save
            send(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(grace_period)
        except subprocess.TimeoutExpired:
            self.end()

    def end(self) -> None:
        """The kernel kills the ranks with torchrun; slow ones are helped along."""
        if self.process.poll() is None and os.getpgid(self.process.pid) == self.process.pid:
            os.killpg(self.process.pid, signal.SIGKILL)
        send(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for status in self.statuses():
            while is_rank(status["pid"], self.attempt_dir):
                send(status["pid"], signal.SIGKILL)
                time.sleep(0.02)

    def statuses(self) -> list[dict]:
        """The last words of this node's own ranks."""
        found = read_statuses(self.attempt_dir, self.processes)
        return [status for status in found if status and status["node"] == self.node and is_here(status)]

    def running(self) -> list[int]:
        """Process numbers of this node's ranks that run; a killed one has left no word of its end."""
        pids = [status["pid"] for status in self.statuses() if status["state"] == "running"]
        return [pid for pid in pids if is_rank(pid, self.attempt_dir)]

    def cancelled(self) -> None:
        """A signal from elsewhere to workers of this machine is no decision about the run."""


def is_rank(pid: int, attempt_dir: Path) -> bool:
    """Whether `pid` is still that worker, not another process that was given its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return str(attempt_dir).encode() in command


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
