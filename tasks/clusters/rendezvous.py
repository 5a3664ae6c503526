"""How the nodes of an attempt meet before torchrun: all are there, all are the same, and each reaches the first one."""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infini_llama.configs.errors import ConfigError, DataError, PipelineError
from infini_llama.tasks.clusters import node_records as records
from infini_llama.tasks.clusters.address import Listener, fault_of_reaching, own_address, own_address_towards
from infini_llama.tasks.clusters.consistency import differences, facts
from infini_llama.tasks.clusters.relay import relayed
from infini_llama.tasks.runs.heartbeat import HeartbeatRecord
from infini_llama.tasks.train.launch import Torchrun

log = logging.getLogger("infini_llama.nodes")
POLL_SECONDS = 0.2
PATIENCE = 5.0  # seconds before the first warning about nodes that are missing
ENDING = 30.0  # seconds that the nodes get to end their workers
BIND_SECONDS = 30.0  # that an earlier attempt's torchrun may still hold the port


@dataclass(frozen=True)
class Place:
    """A node's place in an attempt: which one it is, and where the first one is found."""

    attempt_dir: Path
    node: int
    nnodes: int
    rendezvous: str
    address: str
    port: int

    def torchrun(self) -> list[str]:
        """The arguments by which torchrun meets those of the other nodes."""
        name = f"{self.attempt_dir.parents[1].name}-{self.attempt_dir.name}"
        both = [f"--nnodes={self.nnodes}", f"--rdzv-id={name}"]
        if self.rendezvous == "static":
            where = [f"--master-addr={self.address}", f"--master-port={self.port}"]
            return [*both, f"--node-rank={self.node}", *where]
        own = self.address if self.node == 0 else own_address_towards(self.address)
        where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.address}:{self.port}"]
        where += [f"--local-addr={own}"] if own else []
        return [*both, *where, f"--rdzv-conf=is_host={int(self.node == 0)}"]


def greeting(attempt_dir: Path) -> str:
    return f"infini-llama {attempt_dir}"


def gather(attempt_dir: Path, order: dict, requested: dict, each_poll: Callable[[], None]) -> Place:
    """The first node's part: opens the meeting, waits for all others, compares them with itself, and says go.

    Args:
        requested: {"nnodes", "master_addr", "port"}; the latter two may be "auto".
        each_poll: called a few times a second; what it raises ends the meeting.

    Raises:
        ConfigError: the nodes are not the same; a sentence for each difference.
        DataError: the dataset is not here, or not there.
        PipelineError: a node is missing, or cannot reach this node; another attempt may succeed.
    """
    nnodes, patience = requested["nnodes"], order["config"]["environment"]["join_timeout"]
    try:
        mine = facts(order)
        records.update(attempt_dir, 0, facts=mine, state="ready")
        with _listener(attempt_dir, requested["port"]) as listener:
            address = own_address() if requested["master_addr"] == "auto" else requested["master_addr"]
            if address is None:
                raise ConfigError(
                    f"environment.master_addr=auto, but {socket.gethostname()} has only a loopback address; set it "
                    "to the address at which the other nodes reach this machine."
                )
            place = Place(attempt_dir, 0, nnodes, order["plan"]["rendezvous"], address, listener.port)
            records.say(attempt_dir, "open", address=address, port=listener.port, notices=[])
            _await_all(place, patience, each_poll)
        records.say(attempt_dir, "go", notices=[])
        return place
    except PipelineError as fault:
        records.say(attempt_dir, "refused", code=fault.exit_code, sentence=str(fault))
        raise


def _listener(attempt_dir: Path, port: int | str) -> Listener:
    until = time.monotonic() + BIND_SECONDS
    while True:
        try:
            return Listener(0 if port == "auto" else int(port), greeting(attempt_dir))
        except OSError as fault:
            if time.monotonic() > until:
                raise PipelineError(
                    f"node 0 ({socket.gethostname()}) cannot listen at environment.port={port} ({fault.strerror}); "
                    "end the program that listens there, choose another port or use auto."
                ) from fault
            time.sleep(0.5)


def _await_all(place: Place, patience: float, each_poll: Callable[[], None]) -> None:
    began, notices = time.monotonic(), []
    while True:
        each_poll()
        there = {node: records.read(records.node_path(place.attempt_dir, node)) for node in range(place.nnodes)}
        faults = [record for record in there.values() if record.get("state") == "refused"]
        if faults:
            error = DataError if all(record["code"] == DataError.exit_code for record in faults) else ConfigError
            raise error("\n".join(record["sentence"] for record in faults))
        unlike = [line for record in there.values() if "facts" in record for line in differences(there[0], record)]
        if unlike:
            raise ConfigError("the nodes differ:\n  " + "\n  ".join(unlike))
        if all(record.get("state") == "ready" for record in there.values()):
            return
        lacking = _lacking(place, there)
        waited = time.monotonic() - began
        if waited > patience:
            raise PipelineError(f"after {waited:.0f} s (environment.join_timeout): " + " ".join(lacking))
        if waited > PATIENCE and lacking != notices:
            notices = lacking
            records.say(place.attempt_dir, "open", notices=lacking)
            for line in lacking:
                log.warning(line)
        time.sleep(POLL_SECONDS)


def _lacking(place: Place, there: dict[int, dict]) -> list[str]:
    """A sentence for each node that is not ready; one for all nodes without any record."""
    run = place.attempt_dir.parents[1]
    absent = [str(node) for node, record in there.items() if not record]
    found = [record["sentence"] for record in there.values() if record.get("state") == "unreachable"]
    if absent:
        found.append(
            f"Node {', '.join(absent)} of {place.nnodes} has not joined; start `infini-llama join {run}` on each "
            "other machine."
        )
    return found


def meet(attempt_dir: Path, order: dict, requested: dict, node: int, each_poll: Callable[[], None]) -> Place:
    """Another node's part: says what it has, finds the way to the first one, and waits for its go.

    Args:
        requested: {"nnodes", "master_addr", "port"}; "auto": as the first node says.

    Raises:
        ConfigError, DataError, PipelineError: as `gather`, when the first node has refused.
    """
    try:
        records.update(attempt_dir, node, facts=facts(order))
    except DataError as fault:
        sentence = f"node {node} ({socket.gethostname()}): {fault}"
        records.update(attempt_dir, node, state="refused", code=fault.exit_code, sentence=sentence)
        raise
    reached, reported = False, ""
    while True:
        each_poll()
        word = records.word(attempt_dir)
        if word.get("state") == "refused":
            raise _refusal(word)
        if "address" in word:
            address = word["address"] if requested["master_addr"] == "auto" else requested["master_addr"]
            port = word["port"] if requested["port"] == "auto" else int(requested["port"])
            if word["state"] == "go" and reached:
                return Place(attempt_dir, node, requested["nnodes"], order["plan"]["rendezvous"], address, port)
            if word["state"] == "open" and not reached:
                fault = fault_of_reaching(address, port, greeting(attempt_dir))
                reached = fault is None
                sentence = "" if reached else _unreachable(attempt_dir, node, address, port, fault)
                if sentence and sentence != reported:
                    log.warning(sentence)
                if reached or sentence != reported:
                    records.update(attempt_dir, node, state="ready" if reached else "unreachable", sentence=sentence)
                reported = sentence
        time.sleep(POLL_SECONDS)


def _refusal(word: dict) -> PipelineError:
    kinds = {ConfigError.exit_code: ConfigError, DataError.exit_code: DataError}
    return kinds.get(word["code"], PipelineError)(word["sentence"])


def _unreachable(attempt_dir: Path, node: int, address: str, port: int, fault: str | None) -> str:
    first, here = records.read(records.node_path(attempt_dir, 0)).get("host"), socket.gethostname()
    return (
        f"Node {node} ({here}) cannot reach node 0 ({first}) at {address}:{port}: {fault}; allow TCP from {here} to port "
        f"{port} of {first} (and between all ports above 1023 of both, for the workers), or set environment.master_addr."
    )


class Nodes:
    """What the command that trains reads of the nodes of an attempt."""

    attempt_dir: Path

    def refusal(self) -> PipelineError | None:
        """Why the nodes did not start, if they did not."""
        word = records.word(self.attempt_dir)
        return _refusal(word) if word.get("state") == "refused" else None

    def notices(self) -> list[str]:
        """What the nodes are waiting for, in sentences."""
        return records.word(self.attempt_dir).get("notices", [])

    def heartbeats(self, node: int) -> dict[int, tuple[HeartbeatRecord, bool]]:
        """The newest heartbeats of another node's ranks, by rank, and whether the process is stopped."""
        return relayed(self.attempt_dir, node)


@dataclass(frozen=True)
class FirstNode(Nodes, Torchrun):
    """The agent of the first of several nodes, which this process has started on its own machine."""

    def end(self) -> None:
        """Kill what still runs here; the other nodes end what they started."""
        self.kill()
        end_nodes(self.attempt_dir)


def end_nodes(attempt_dir: Path) -> None:
    """Tells the nodes that the attempt is over, and waits a while until they have ended what they started."""
    there = sorted(attempt_dir.glob("node-*.json"))
    if not there:
        return
    records.say(attempt_dir, "over", notices=[])
    until = time.monotonic() + ENDING
    while lingering := [path for path in there if not records.has_ended(path)]:
        if time.monotonic() > until:
            names = ", ".join(f"{path.stem} ({records.read(path).get('host')})" for path in lingering)
            log.warning("%s did not report within %.0f s that its workers have ended", names, ENDING)
            return
        time.sleep(POLL_SECONDS)
