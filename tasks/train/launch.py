"""Start of an attempt's workers, as children of this process.

torchrun runs on this machine, or on every node by a launcher.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from infini_llama.configs.schema import EnvironmentConfig
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.status import Endpoint, RankStatus
from infini_llama.tasks.runs import exec_wrapper
from infini_llama.tasks.runs.status import is_here, read_statuses
from infini_llama.tasks.storage.files import write_atomic
from infini_llama.tasks.train.processes import is_rank, send
from infini_llama.tasks.train.rendezvous import (
    JOIN_TIMEOUT,
    gloo_interface,
    host_rendezvous,
    own_address_towards,
)

log = logging.getLogger("infini_llama.train")
SRUN_END_SECONDS = 60.0  # that srun may take to end its step on all nodes
# That ranks may take to end by SIGKILL; one that waits inside a driver or for a dead filesystem
# ends when that answers.
KILL_SECONDS = 30.0
# An exception and the first line of its message, but not torchrun's own about a worker, which a
# summary follows.
EXCEPTION = re.compile(
    r"^(?!.*ChildFailedError)[\w.]+(?:Error|Exception):\s*\S.*", re.MULTILINE
)
# What Python's faulthandler writes of a signal that it dies of, before the stacks.
CRASH = re.compile(rb"^Fatal Python error: (.+)$", re.MULTILINE)
END_OF_LOG = 2**20  # bytes
# Seconds after a signal in which torchrun kills its ranks, if their supervisor, which does so after
# the grace period, is gone. runtime.grace_period may be as long.
TORCHRUN_END_SECONDS = 3600
# File in the attempt's folder: JOB.STEP, written by the node that hosts the rendezvous.
SLURM_STEP = "slurm-step"


def torchrun_command(
    attempt_dir: Path, plan: EnvironmentPlan, endpoint: Endpoint, is_host: bool
) -> list[str]:
    """The command that starts this machine's workers of an attempt.

    Args:
        endpoint: where the torchruns of all nodes find each other (c10d).
        is_host: the endpoint is this torchrun's.
    """
    # Without an address, torchrun and its workers use the host's name, which other machines, and
    # this one, may not resolve.
    local_address = (
        endpoint.address if is_host else own_address_towards(endpoint.address)
    )
    command = [
        sys.executable,
        "-m",
        "infini_llama.tasks.train.torchrun",
        "--max-restarts=0",
    ]
    # Else it leaves a folder in TMPDIR. Not the null device: torchrun would follow that with
    # threads, which a second signal keeps from ending, and torchrun with them.
    command.append(f"--log-dir={attempt_dir / 'torchrun'}")
    command += [
        f"--nnodes={plan.nnodes}",
        f"--rdzv-id={attempt_dir.parents[1].name}-{attempt_dir.name}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint.address}:{endpoint.port}",
        f"--rdzv-conf=is_host={int(is_host)},join_timeout={JOIN_TIMEOUT}",
        *([f"--local-addr={local_address}"] if local_address else []),
    ]
    module = ["--module", "infini_llama.tasks.train.worker", str(attempt_dir)]
    return [*command, f"--nproc-per-node={plan.nproc_per_node}", *module]


def torchrun_environment(variables: dict[str, str]) -> dict[str, str]:
    """The environment of torchrun: this process's and `variables`.

    PET_* is left out: torchrun would read it as its own options.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("PET_")
    }
    forced = {
        # After a signal; after a rank's failure it is 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(TORCHRUN_END_SECONDS),
        # A folder named tasks/ where the user stands must not shadow ours.
        "PYTHONSAFEPATH": "1",
    }
    return inherited | variables | forced


def spawn(
    command: list[str], log_file: Path, variables: dict[str, str], lock_fds: list[int]
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, so that no terminal's Ctrl-C reaches it.

    When this process dies, the kernel sends it SIGTERM.

    Args:
        variables: all of `torchrun_environment`.
        lock_fds: the first, the run's lock, becomes standard input, the one descriptor that
            torchrun hands on to its workers: while any of them lives, no other command can take the
            run. The others are torchrun's, which outlives its workers.
    """
    with log_file.open("ab") as output:
        return subprocess.Popen(
            [
                sys.executable,
                exec_wrapper.__file__,
                "SIGTERM",
                str(os.getpid()),
                *command,
            ],
            env=variables,
            stdin=lock_fds[0] if lock_fds else subprocess.DEVNULL,
            pass_fds=lock_fds[1:],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@dataclass(frozen=True)
class TorchrunWorkers:
    """torchrun and its ranks on this machine; for other launchers, a subclass in `WORKERS`.

    Attributes:
        process: torchrun.
        attempt_dir: where the ranks write.
        world_size: ranks over all nodes.
    """

    process: subprocess.Popen[bytes]
    attempt_dir: Path
    world_size: int
    nnodes: int

    @classmethod
    def start(
        cls,
        attempt_dir: Path,
        plan: EnvironmentPlan,
        settings: EnvironmentConfig,
        lock_fds: list[int],
    ) -> Self:
        """Start the workers of the attempt in `attempt_dir`.

        Args:
            settings: section `environment` of the configuration.
            lock_fds: the run's lock and those of its GPUs, which the workers keep as long as they
                live.

        Raises:
            ConfigError: the launcher is not installed, or this machine has no address that other
                nodes reach.
        """
        command, variables = cls.command(attempt_dir, plan, settings)
        environment = torchrun_environment(variables | plan.env)
        launcher = settings.started_by
        path = environment.get("PATH", "")
        if (
            not launcher.has_local_workers
            and shutil.which(command[0], path=path) is None
        ):
            raise launcher.not_installed()
        process = spawn(command, attempt_dir / "torchrun.log", environment, lock_fds)
        return cls(process, attempt_dir, plan.world_size, plan.nnodes)

    @classmethod
    def command(
        cls, attempt_dir: Path, plan: EnvironmentPlan, settings: EnvironmentConfig
    ) -> tuple[list[str], dict[str, str]]:
        """The command that starts the workers, and variables that it needs besides the plan's."""
        endpoint = host_rendezvous(attempt_dir, plan)
        if plan.nnodes > 1:
            log.info(
                "%d nodes train: start `infini-llama join %s` on each other machine",
                plan.nnodes,
                attempt_dir.parents[1],
            )
        command = torchrun_command(attempt_dir, plan, endpoint, is_host=True)
        return command, gloo_interface(endpoint)

    @classmethod
    def record_job(cls, attempt_dir: Path) -> None:
        """On the node that hosts the rendezvous: record what `end` needs of the launcher."""

    def poll(self) -> int | None:
        """The exit code once torchrun has ended, negative for a signal; None while it runs."""
        return self.process.poll()

    def wait(self, seconds: float) -> None:
        """Return once torchrun has ended, or after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def request_stop(self) -> None:
        """Have every rank save at its next step boundary, by SIGTERM.

        It goes to torchrun if no rank is up and there is nothing to save.
        """
        for pid in self.running() or [self.process.pid]:
            send(pid, signal.SIGTERM)

    def end_within(self, grace_period: float) -> None:
        """Wait for the end after `request_stop`; kill what still runs after the grace period."""
        self.wait(grace_period)
        self.end()

    def end(self) -> None:
        """Kill what still runs; return once no rank of this torchrun is left that SIGKILL ends."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # torchrun starts each rank in a session of its own, which is outside the process group
        # killed above.
        until = time.monotonic() + KILL_SECONDS
        for status in self.statuses():
            while is_rank(status.pid, self.attempt_dir):
                send(status.pid, signal.SIGKILL)
                if time.monotonic() > until:
                    log.error(
                        "rank %d (process %d) does not end by SIGKILL: a driver or a filesystem "
                        "does not answer it. It trains no more, but may hold memory of its GPU; "
                        "restart the machine to free it",
                        status.rank,
                        status.pid,
                    )
                    break
                time.sleep(0.02)

    def statuses(self) -> list[RankStatus]:
        """The statuses of the ranks that this torchrun started."""
        statuses = read_statuses(self.attempt_dir, self.world_size)
        return [
            status
            for status in statuses
            if status and status.parent == self.process.pid and is_here(status)
        ]

    def running(self) -> list[int]:
        """Process IDs of the ranks that run; a killed rank leaves the status "running"."""
        pids = [status.pid for status in self.statuses() if status.state == "running"]
        return [pid for pid in pids if is_rank(pid, self.attempt_dir)]

    def hint(self) -> str:
        """Why no rank may have started.

        A known cause, else the last exception that torchrun.log has, or its last line.
        """
        text = self.log()
        if "EADDRINUSE" in text:
            return (
                "another program has taken the port of the rendezvous; "
                "end it, or change environment.master_port (auto: a free one)"
            )
        if self.nnodes > 1 and (not text or "Rendezvous" in text):
            return f"not all nodes joined within {JOIN_TIMEOUT} s"
        # Lines without the frame of torchrun's summary.
        lines = re.findall(r".*\w.*", text)
        candidates = EXCEPTION.findall(text) or lines or [""]
        return " ".join(candidates[-1].split())

    def crashes(self) -> dict[int, str]:
        """The signal of each rank that crashed, such as "segmentation fault", as its log says."""
        found: dict[int, str] = {}
        for rank in range(self.world_size):
            log = self.attempt_dir / f"rank-{rank}.log"
            with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - END_OF_LOG))
                crash = CRASH.search(file.read())
                if crash:
                    found[rank] = crash[1].decode(errors="replace").lower()
        return found

    def log(self) -> str:
        """The output of torchrun."""
        return (self.attempt_dir / "torchrun.log").read_text(
            encoding="utf-8", errors="replace"
        )


@dataclass(frozen=True)
class SrunWorkers(TorchrunWorkers):
    """srun, with a torchrun and its ranks on every node.

    The nodes are of the allocation that this process is in, or of one that srun requests.
    """

    @classmethod
    def command(
        cls, attempt_dir: Path, plan: EnvironmentPlan, settings: EnvironmentConfig
    ) -> tuple[list[str], dict[str, str]]:
        options = settings.srun_options
        command = [
            "srun",
            f"--job-name={attempt_dir.parents[1].name}",
            f"--nodes={plan.nnodes}",
            f"--ntasks={plan.nnodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={plan.nproc_per_node * plan.threads}",
            # The ranks of the other nodes end by themselves, and write their status.
            "--kill-on-bad-exit=0",
            "--input=none",
            "--export=ALL",
            f"--chdir={attempt_dir}",
        ]
        asks_for_gpus = any(
            option.startswith(("--gpus", "--gres")) for option in options
        )
        allocates_nodes = settings.started_by.allocates_nodes(os.environ)
        if plan.device == "cuda" and allocates_nodes and not asks_for_gpus:
            command.append(f"--gpus-per-node={plan.nproc_per_node}")
        # Started once on each node, where it becomes torchrun.
        node = [
            sys.executable,
            "-m",
            "infini_llama.tasks.train.nodes",
            str(attempt_dir),
        ]
        return [*command, *options, *node], {}

    @classmethod
    def record_job(cls, attempt_dir: Path) -> None:
        step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
        write_atomic(attempt_dir / SLURM_STEP, step)

    def request_stop(self) -> None:
        """Have srun pass SIGUSR1 to all processes of its step.

        It would answer SIGTERM by killing them.
        """
        statuses = read_statuses(self.attempt_dir, self.world_size)
        up = any(status and status.state == "running" for status in statuses)
        send(self.process.pid, signal.SIGUSR1 if up else signal.SIGTERM)

    def end(self) -> None:
        """Have srun kill its step; where srun itself was killed, cancel the step.

        Return once the step has left the nodes.
        """
        if self.poll() is None:
            send(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(SRUN_END_SECONDS)
            except subprocess.TimeoutExpired:
                send(self.process.pid, signal.SIGKILL)
                self.process.wait()
        try:
            step = (self.attempt_dir / SLURM_STEP).read_text(encoding="utf-8")
        except OSError:  # no node had started
            return
        until = time.monotonic() + SRUN_END_SECONDS
        while time.monotonic() < until:
            running_steps = _slurm(
                "squeue", "--steps", "--noheader", "--format=%i"
            ).split()
            if step not in running_steps:
                break
            _slurm("scancel", "--signal=KILL", step)
            time.sleep(0.5)

    def hint(self) -> str:
        """srun's own last words, where it ended before any node had started."""
        if (self.attempt_dir / SLURM_STEP).exists():
            return super().hint()
        lines = self.log().strip().splitlines()
        return lines[-1] if lines else "srun printed nothing"


def _slurm(*command: str) -> str:
    """The output of one of Slurm's commands.

    "" if the command is missing or the controller does not answer.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


# The class of each launcher of configs/launchers.py.
WORKERS: dict[str, type[TorchrunWorkers]] = {
    "local": TorchrunWorkers,
    "srun": SrunWorkers,
}
