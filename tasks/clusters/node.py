"""One machine's part in a run on several: `python -m infini_llama.tasks.clusters.node RUN_OR_ATTEMPT`.

Given a run's folder it takes part in every attempt until the run has ended, as the run's leader (the command that trains, on whatever
machine) makes them. Given an attempt's folder (runs/NAME/logs/attempt-NN) it takes part in that one alone and lives on when the
leader dies, as a job of a cluster does whose scheduler ends it. Run and dataset lie on a filesystem that all nodes see.

What is not given on the command line is read from NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, else from the attempt's plan.
One node has rank 0, and this program is that one too where the leader runs elsewhere; the only node of a cluster's job is rank 0.
SIGTERM stops the workers with a checkpoint. Ends with an exit code of docs/resume.md.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from infini_llama.configs.errors import ConfigError, ExitCode, PipelineError, Preempted
from infini_llama.configs.secrets import MASK
from infini_llama.tasks.clusters import rendezvous
from infini_llama.tasks.clusters.address import interface_towards
from infini_llama.tasks.clusters.leader import Leader, end_of, newest_attempt
from infini_llama.tasks.clusters.node_records import claim, end_attempt, is_over
from infini_llama.tasks.clusters.relay import Relay, relayed
from infini_llama.tasks.clusters.restart import superseded
from infini_llama.tasks.records.job import TrainingJob
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.runs.job_file import read_job
from infini_llama.tasks.runs.outcome import classify
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.signals import debounced, hangup_as_termination
from infini_llama.tasks.runs.status import NODE
from infini_llama.tasks.storage.artifacts import write_atomic
from infini_llama.tasks.storage.locks import Lock
from infini_llama.tasks.train import launch as local
from infini_llama.tasks.train.launcher import HUNG
from infini_llama.tasks.train.supervisor import Hung, Watch

log = logging.getLogger("infini_llama.nodes")
POLL_SECONDS = 0.2
ENDING = 10.0  # seconds for torchrun to end by itself after its ranks and the first node have


class Stopped(BaseException):
    """SIGTERM: this node's workers save and end."""


class Over(Exception):
    """The leader, or the first node, has ended this attempt."""


@dataclass(frozen=True)
class NodeSettings:
    """What this node was told about its place; None: as the plan says, and of the node's number: a free one."""

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    port: int | None = None

    @classmethod
    def of_variables(cls, node_rank: int | None = None) -> "NodeSettings":
        """NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, as schedulers set them."""
        rank = _number("NODE_RANK") if node_rank is None else node_rank
        return cls(_number("NNODES"), rank, os.environ.get("MASTER_ADDR"), _number("MASTER_PORT"))

    def over(self, plan: EnvironmentPlan) -> EnvironmentPlan:
        """The plan with what is set here.

        Raises:
            ConfigError: the number of nodes is another than the plan's.
        """
        if self.nnodes not in (None, plan.nnodes):
            raise ConfigError(
                f"NNODES={self.nnodes}, but the run has environment.nnodes={plan.nnodes}; use the same number for both."
            )
        return plan.model_copy(
            update={"master_addr": self.master_addr or plan.master_addr, "port": self.port or plan.port}
        )


def follow(run: RunFolder, requested: NodeSettings, timeout: float = 600.0) -> int:
    """Takes part in one attempt after the other until the run has ended; returns the exit code of that end.

    Args:
        timeout: seconds without a leader after which it is not waited for any more.
    """
    taken: set[Path] = set()
    led = False  # else an end on record is from before this node came, and a leader may be about to carry on what is not done
    with Leader(run.path / "lease") as leader:
        since = time.monotonic()
        while True:
            newest = newest_attempt(run)
            led |= leader.lives
            late = time.monotonic() - since > timeout
            if newest is not None and newest not in taken and leader.lives:
                taken.add(newest)
                log.info("%s ended with %d here", newest.name, _one(newest, requested, leader))
                since = time.monotonic()
            elif (ended := end_of(run, leader)) is not None and (led or late or ended == 0):
                return ended
            elif leader.lives:
                since = time.monotonic()
            elif late:
                raise PipelineError(
                    f"no command has led the run {run.path} for {timeout:.0f} s; start it on the first node."
                )
            time.sleep(POLL_SECONDS)


def _one(attempt_dir: Path, requested: NodeSettings, leader: Leader) -> int:
    """The exit code of one attempt of several: where the nodes did not start together, the next one may succeed."""
    try:
        return take_part(attempt_dir, requested, leader)
    except PipelineError as fault:
        if fault.exit_code != PipelineError.exit_code:
            raise
        log.error("%s", fault)
        return fault.exit_code


def take_part(attempt_dir: Path, requested: NodeSettings, leader: Leader | None) -> int:
    """This node's part in one attempt, from the rendezvous to the end of its workers; returns an exit code.

    Args:
        leader: without it the node goes on when the leader has died.

    Raises:
        PipelineError: the nodes do not start together.
        Preempted: this node was asked to stop while it followed a leader.
    """
    job = read_job(attempt_dir)
    plan = requested.over(job.plan)
    node = claim(attempt_dir, requested.node_rank if plan.nnodes > 1 else 0, plan.nnodes)
    log.info("node %d of %d in %s", node, plan.nnodes, attempt_dir)

    def poll() -> None:
        if is_over(attempt_dir):
            raise Over
        if leader is not None and not leader.lives:
            log.warning("the leader no longer sends heartbeats")
            raise Over

    try:
        with ExitStack() as locks:
            fds = _locks(locks, attempt_dir, node)
            found = rendezvous.reach(attempt_dir, node, plan, poll) if node else rendezvous.host(attempt_dir, plan)
            return _train(attempt_dir, node, job.model_copy(update={"plan": found}), fds, poll)
    except Over:
        return ExitCode.UNEXPECTED
    except Preempted as stopped:
        if leader is not None:
            raise
        log.warning("%s", stopped)
        return stopped.exit_code
    finally:
        if node == 0:
            end_attempt(attempt_dir)


def _locks(locks: ExitStack, attempt_dir: Path, node: int) -> list[int]:
    """What the workers hold as long as they live: the run's lock, where the leader has handed it on, else one of this node."""
    if node == 0 and os.path.realpath("/proc/self/fd/0") == str(attempt_dir.parents[1] / "lock"):
        return [0]
    return [locks.enter_context(Lock(attempt_dir.parents[1] / f"node-{node}.lock", wait=ENDING)).fd]


def _train(attempt_dir: Path, node: int, job: TrainingJob, fds: list[int], poll: Callable[[], None]) -> int:
    plan, settings, grace = job.plan, job.config.environment, job.grace_period
    command = local.torchrun(
        attempt_dir, plan, rendezvous.torchrun_options(attempt_dir, node, plan, settings.join_timeout)
    )
    own_session = os.getsid(0) != os.getpid()  # else this process's end is that of its whole session
    log_file = attempt_dir / ("torchrun.log" if plan.nnodes == 1 else f"torchrun-{node}.log")
    process = local.spawn(command, log_file, environment(plan, node), grace, fds, new_session=own_session)
    ranks = local.Torchrun(process, attempt_dir, plan.world_size, node)
    relay, waiting = Relay(attempt_dir, node), rendezvous.WaitingForNodes(attempt_dir, plan.nnodes)
    # The command that leads a job of a cluster is not beside the ranks, and does not watch them.
    watch = Watch(
        attempt_dir,
        ranks.processes,
        job.config.runtime.hang_after,
        partial(relayed, attempt_dir),
        nodes_meet=plan.nnodes > 1,
    )
    watches = node == 0 and settings.launcher != "local"
    try:
        while process.poll() is None:
            poll()
            with suppress(OSError):  # the filesystem does not answer just now
                statuses = ranks.statuses()
                relay.write(statuses)
                if node == 0:
                    waiting.poll(started=bool(statuses))
            if watches:
                watch.poll()
            time.sleep(POLL_SECONDS)
    except Hung as hung:
        log.error("%s", hung)
        write_atomic(attempt_dir / HUNG, str(hung))
        _end_with_the_others(ranks)
        return ExitCode.HUNG
    except Over:
        _end_with_the_others(ranks)
    except BaseException as asked:
        log.warning("stop requested; waiting up to %.0f s for a checkpoint", grace)
        ranks.stop(grace)
        raise Preempted(
            f"node {node} received a stop signal and its workers have ended; run the same command to rejoin."
        ) from asked
    finally:
        ranks.end()
    return classify(process.wait(), list(ranks.statuses()) or [None], str(attempt_dir)).code


def _end_with_the_others(ranks: local.Torchrun) -> None:
    """Ranks that still run are stuck or cut off: they write down where, and are killed; torchrun alone may end by itself."""
    running = ranks.running()
    for pid in running:
        local.send(pid, signal.SIGUSR2)
    deadline = time.monotonic() + (1.0 if running else ENDING)
    while ranks.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def environment(plan: EnvironmentPlan, node: int) -> dict[str, str]:
    """The workers' variables: the plan's, this node's number, and its own interface towards the others.

    What the plan has hidden as a secret has to be in this process's own environment.
    """
    hidden = [name for name, value in plan.env.items() if value == MASK]
    if missing := [name for name in hidden if name not in os.environ]:
        log.warning(
            "the value of environment.env.%s is not stored, because it may be a secret; set it on this machine too",
            ", ".join(missing),
        )
    variables = {name: value for name, value in plan.env.items() if name not in hidden}
    interface = interface_towards(plan.master_addr) if plan.nnodes > 1 else None
    own = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    return own | variables | {NODE: str(node)}


def parse(arguments: Sequence[str] | None) -> tuple[Path, NodeSettings]:
    parser = argparse.ArgumentParser(
        prog="python -m infini_llama.tasks.clusters.node", description="One machine's part in a run on several."
    )
    parser.add_argument("where", metavar="RUN_OR_ATTEMPT", type=Path)
    default = NodeSettings.of_variables()
    parser.add_argument("--nnodes", type=int, default=default.nnodes)
    parser.add_argument("--node-rank", type=int, default=default.node_rank)
    parser.add_argument("--master-addr", default=default.master_addr)
    parser.add_argument("--master-port", type=int, default=default.port)
    given = parser.parse_args(arguments)
    return given.where.resolve(), NodeSettings(given.nnodes, given.node_rank, given.master_addr, given.master_port)


def _number(*variables: str) -> int | None:
    """The value of the first variable that is set."""
    variable = next((name for name in variables if name in os.environ), None)
    if variable is None:
        return None
    if not (value := os.environ[variable]).isdecimal():
        raise ConfigError(f"{variable}={value} is not an integer.")
    return int(value)


def serve(where: Path, requested: NodeSettings) -> int:
    """Takes part in the attempt, or in all attempts of the run, that `where` is the folder of."""
    if where.name.startswith("attempt-") and where.parent.name == "logs":
        if refused := superseded(where):
            raise PipelineError(refused)
        if requested.node_rank is None:  # Slurm, or Kubernetes' indexed Job, has set which node of the job this is
            requested = replace(requested, node_rank=_number("SLURM_NODEID", "JOB_COMPLETION_INDEX"))
        return take_part(where, requested, None)
    return follow(RunFolder(where), requested)


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, debounced(Stopped))
    hangup_as_termination()
    try:
        return serve(*parse(arguments))
    except PipelineError as fault:
        log.error("%s", fault)
        return fault.exit_code
    except (Stopped, KeyboardInterrupt):
        return Preempted.exit_code


if __name__ == "__main__":
    sys.exit(main())
