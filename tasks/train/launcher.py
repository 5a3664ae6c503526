"""What starts the workers of an attempt and what is known of them afterwards; tasks/clusters has those of clusters."""

from pathlib import Path
from typing import Protocol

from infini_llama.configs.errors import PipelineError
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.runs.heartbeat import HeartbeatRecord

HUNG = "hung"  # file in the attempt's folder: which rank hung, written by the supervisor of a cluster's job


class Launched(Protocol):
    """The workers of one attempt, from their start to their end."""

    @property
    def detached(self) -> bool:
        """Whether they continue without this process, and the next command of the run has to watch them."""
        ...

    def poll(self) -> int | None:
        """The exit code once all have ended, negative for a signal; None while they run."""
        ...

    def stop(self, grace_period: float) -> None:
        """Let every rank save at its next step boundary and wait for the end; after `grace_period` seconds all are killed."""
        ...

    def end(self) -> None:
        """Kill what still runs; return once no rank is left on any node."""
        ...

    def cancelled(self) -> str | None:
        """Who else ended it on purpose; such a run does not continue at once."""
        ...

    def refusal(self) -> PipelineError | None:
        """Why the nodes did not start, if they did not."""
        ...

    def notices(self) -> list[str]:
        """What the nodes are waiting for, in sentences."""
        ...

    def heartbeats(self, node: int) -> dict[int, tuple[HeartbeatRecord, bool]]:
        """The newest heartbeats of the ranks on another node, by rank, and whether the process is stopped (SIGSTOP)."""
        ...


class Launcher(Protocol):
    """Starts workers."""

    def start(self, attempt_dir: Path, plan: EnvironmentPlan, grace_period: float, lock_fds: list[int]) -> Launched:
        """Start the workers of the job in `attempt_dir`.

        Args:
            lock_fds: the run's lock and those of its GPUs, held by workers on this machine.

        Raises:
            ConfigError: the cluster refuses the job.
        """
        ...

    def attach(self, attempt_dir: Path) -> Launched | None:
        """The workers of an attempt whose command has died, if they were detached from it.

        The attempt's own record says what started them, whatever the configuration says now.
        """
        ...
