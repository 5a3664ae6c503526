"""Where torchrun's agents on several nodes find each other, and what node 0 waits for until they have."""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.tasks.clusters.address import fault_of_reaching, own_address, own_address_towards
from infini_llama.tasks.clusters.node_records import end_attempt, read_node, update_node
from infini_llama.tasks.clusters.relay import relayed
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.runs.heartbeat import HeartbeatRecord
from infini_llama.tasks.train import launch as local
from infini_llama.tasks.train.launch import Torchrun

log = logging.getLogger("infini_llama.nodes")
POLL_SECONDS = 0.2
PATIENCE = 5.0  # seconds before the first warning about nodes that are missing
START_SECONDS = 30.0  # in which torchrun of node 0 may only be starting


def torchrun_options(attempt_dir: Path, node: int, plan: EnvironmentPlan, join_timeout: float) -> list[str]:
    """The arguments by which torchrun finds those of the other nodes.

    Args:
        plan: of `host` or `reach`.
        join_timeout: seconds that the nodes wait for each other.
    """
    if plan.nnodes == 1:
        return local.rendezvous(plan.port)
    address, seconds = plan.master_addr, max(1, round(join_timeout))
    both = [f"--nnodes={plan.nnodes}", f"--rdzv-id={attempt_dir.parents[1].name}-{attempt_dir.name}"]
    if plan.rendezvous == "static":
        both += [f"--rdzv-conf=timeout={seconds}", f"--node-rank={node}"]
        return [*both, f"--master-addr={address}", f"--master-port={plan.port}"]
    own = address if node == 0 else own_address_towards(address)
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{plan.port}"]
    where += [f"--local-addr={own}"] if own else []
    return [*both, *where, f"--rdzv-conf=is_host={int(node == 0)},join_timeout={seconds}"]


def host(attempt_dir: Path, plan: EnvironmentPlan) -> EnvironmentPlan:
    """Choose where torchrun of node 0 listens, and write it down for the others; returns the plan with address and port.

    Raises:
        ConfigError: no address of this machine is known.
        PipelineError: the port is in use.
    """
    if plan.nnodes == 1:
        return plan
    name = socket.gethostname()
    address = own_address() if plan.master_addr == "auto" else plan.master_addr
    if address is None:
        raise ConfigError(
            f"environment.master_addr=auto, but {name} has only a loopback address; set it to the address at which "
            "the other nodes reach this machine."
        )
    try:
        with socket.create_server(("", 0 if plan.port == "auto" else plan.port)) as free:
            port: int = free.getsockname()[1]
    except OSError as fault:
        raise PipelineError(
            f"node 0 ({name}) cannot listen at environment.port={plan.port} ({fault.strerror}); end the program that listens there, choose "
            "another port or use auto."
        ) from fault
    update_node(attempt_dir, 0, address=address, port=port)
    return plan.model_copy(update={"master_addr": address, "port": port})


def reach(attempt_dir: Path, node: int, plan: EnvironmentPlan, each_poll: Callable[[], None]) -> EnvironmentPlan:
    """Wait until torchrun of node 0 answers; returns the plan with its address and port.

    Args:
        each_poll: called a few times per second; what it raises ends the wait.
    """
    since, reported = time.monotonic(), ""
    while True:
        each_poll()
        first = read_node(attempt_dir, 0)
        if first and first.port:
            address = first.address if plan.master_addr == "auto" else plan.master_addr
            port = first.port if plan.port == "auto" else plan.port
            fault = fault_of_reaching(address, port)
            if fault is None:
                update_node(attempt_dir, node, fault="")
                return plan.model_copy(update={"master_addr": address, "port": port})
            here = socket.gethostname()
            sentence = (
                f"Node {node} ({here}) cannot reach node 0 ({first.host}) at {address}:{port}: {fault}; allow TCP from "
                f"{here} to port {port} of {first.host} (and between all ports above 1023 of both, for the workers), or set "
                "environment.master_addr."
            )
            if sentence != reported and time.monotonic() - since > START_SECONDS:
                log.warning(sentence)
                update_node(attempt_dir, node, fault=sentence)
                reported = sentence
        time.sleep(POLL_SECONDS)


@dataclass
class WaitingForNodes:
    """Has node 0 report which nodes are missing, until workers have started."""

    attempt_dir: Path
    nnodes: int
    since: float = field(default_factory=time.monotonic)
    reported: tuple[str, ...] = ()

    def poll(self, started: bool) -> None:
        """Write down what is missing, where that has changed; nothing once workers have `started`."""
        missing = () if started or time.monotonic() - self.since < PATIENCE else self._missing()
        if missing != self.reported:
            self.reported = missing
            update_node(self.attempt_dir, 0, waiting_for=missing)
            for line in missing:
                log.warning(line)

    def _missing(self) -> tuple[str, ...]:
        there = {node: read_node(self.attempt_dir, node) for node in range(1, self.nnodes)}
        absent = ", ".join(str(node) for node, record in there.items() if record is None)
        run = self.attempt_dir.parents[1]
        start = f"Node {absent} of {self.nnodes} has not joined; start `infini-llama join {run}` on each other machine."
        return *([start] if absent else []), *(record.fault for record in there.values() if record and record.fault)


class Nodes:
    """What the command that trains reads of the nodes of an attempt."""

    attempt_dir: Path

    def refusal(self) -> PipelineError | None:
        """Why no worker started, if nodes were missing."""
        missing = self.notices()
        return PipelineError("not all nodes came together: " + " ".join(missing)) if missing else None

    def notices(self) -> list[str]:
        """What the nodes are waiting for, in sentences."""
        first = read_node(self.attempt_dir, 0)
        return list(first.waiting_for) if first else []

    def heartbeats(self, node: int) -> dict[int, tuple[HeartbeatRecord, bool]]:
        """The newest heartbeats of another node's ranks, by rank, and whether the process is stopped."""
        return relayed(self.attempt_dir, node)


@dataclass(frozen=True)
class FirstNode(Nodes, Torchrun):
    """The agent of the first of several nodes, which this process has started on its own machine."""

    def end(self) -> None:
        """Kill what still runs here; the other nodes end what they started."""
        self.kill()
        end_attempt(self.attempt_dir)
