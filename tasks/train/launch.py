"""torchrun on this machine: started, stopped, and ended with every rank it started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from infini_llama.configs.errors import PipelineError
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.status import RankStatus
from infini_llama.tasks.runs.heartbeat import HeartbeatRecord
from infini_llama.tasks.runs.job_file import job_path
from infini_llama.tasks.runs.status import is_here, read_statuses
from infini_llama.tasks.train import exec_wrapper


class LocalLauncher:
    """Starts torchrun on this machine alone."""

    def start(self, attempt_dir: Path, plan: EnvironmentPlan, grace_period: float, lock_fds: list[int]) -> "Torchrun":
        """Start the workers of the job in `attempt_dir`."""
        command = torchrun(attempt_dir, plan, rendezvous(plan.port))
        process = spawn(command, attempt_dir / "torchrun.log", plan.env, grace_period, lock_fds, new_session=True)
        return Torchrun(process, attempt_dir, plan.nproc_per_node)

    def attach(self, attempt_dir: Path) -> None:
        """The kernel ends these workers with the command that started them."""


def torchrun(attempt_dir: Path, plan: EnvironmentPlan, where: list[str]) -> list[str]:
    """The command that starts this machine's workers of an attempt."""
    command = [sys.executable, "-m", "torch.distributed.run", *where, "--max-restarts=0"]
    # Else it leaves a folder in TMPDIR. Not the null device: torchrun would follow that with threads, which a second signal
    # keeps from ending, and torchrun with them.
    command.append(f"--log-dir={attempt_dir / 'torchrun'}")
    return [
        *command,
        f"--nproc-per-node={plan.nproc_per_node}",
        "--module",
        "infini_llama.tasks.train.worker",
        str(job_path(attempt_dir)),
    ]


def spawn(
    command: list[str], log: Path, env: dict[str, str], grace_period: float, lock_fds: list[int], new_session: bool
) -> subprocess.Popen[bytes]:
    """A command that the kernel tells to stop (SIGTERM) when this process dies.

    Args:
        env: on top of this process's own.
        lock_fds: the run's lock, the first one, travels as standard input, the one descriptor that torchrun hands on to its workers:
            while any of them lives, no other command can take the run. The others are torchrun's, which outlives its workers.
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


def rendezvous(port: int | str) -> list[str]:
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

    process: subprocess.Popen[bytes]
    attempt_dir: Path
    processes: int
    node: int = 0
    detached: bool = False

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self, grace_period: float) -> None:
        """Send SIGTERM to the ranks and wait for the end; after `grace_period` seconds kill them."""
        pids = self.running()
        for pid in pids:
            send(pid, signal.SIGTERM)
        if not pids:  # no rank is up: there is nothing to save
            send(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(grace_period)
        except subprocess.TimeoutExpired:
            self.kill()

    def end(self) -> None:
        """Kill what still runs; return once no rank is left."""
        self.kill()

    def kill(self) -> None:
        """The kernel kills the ranks with torchrun; ranks that remain are killed here."""
        if self.process.poll() is None and os.getpgid(self.process.pid) == self.process.pid:
            os.killpg(self.process.pid, signal.SIGKILL)
        send(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for status in self.statuses():
            while is_rank(status.pid, self.attempt_dir):
                send(status.pid, signal.SIGKILL)
                time.sleep(0.02)

    def statuses(self) -> list[RankStatus]:
        """The statuses of this node's own ranks."""
        found = read_statuses(self.attempt_dir, self.processes)
        return [status for status in found if status and status.node == self.node and is_here(status)]

    def running(self) -> list[int]:
        """Process numbers of this node's ranks that run; a killed one has left no word of its end."""
        pids = [status.pid for status in self.statuses() if status.state == "running"]
        return [pid for pid in pids if is_rank(pid, self.attempt_dir)]

    def cancelled(self) -> None:
        """A signal from elsewhere to workers of this machine is no decision about the run."""

    def refusal(self) -> PipelineError | None:
        """One node needs no rendezvous."""

    def notices(self) -> list[str]:
        """One node waits for no other."""
        return []

    def heartbeats(self, node: int) -> dict[int, tuple[HeartbeatRecord, bool]]:
        """All ranks are on this machine."""
        return {}


def is_rank(pid: int, attempt_dir: Path) -> bool:
    """Whether `pid` is still that worker, not another process that was given its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return str(attempt_dir).encode() in command


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped (SIGSTOP, SIGTSTP; not one in a debugger, which is "t"); False where unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
