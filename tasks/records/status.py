"""Reports of ranks while an attempt runs, and how the attempt ended."""

from typing import Literal

from pydantic import Field

from infini_llama.tasks.records.record import Record

EndKind = Literal["done", "preempted", "failed"]
RankState = Literal["running", "done", "preempted", "failed"]


class RankError(Record):
    """The reason for which a rank failed.

    Attributes:
        type: of the exception.
        message: of `error_message`. This and the traceback are "" in attempts.jsonl.
        peer_lost: a collective failed because another rank is gone; that one is the cause, not
            this.
        phase: of the heartbeat.
        sample_rows: row numbers of the global batch; None outside a step.
        memory: bytes by name.
        first_skip: of a diverged run, the first step whose update was skipped.
        samples: consumed when training gave up.
    """

    type: str
    message: str = ""
    traceback: str = ""
    peer_lost: bool = False
    phase: str = ""
    sample_rows: tuple[int, ...] | None = None
    memory: dict[str, int] = Field(default_factory=dict)
    first_skip: int | None = None
    samples: int | None = None


class RankStatus(Record):
    """The state of a rank: an atomic file that overrides torchrun's exit code.

    Attributes:
        code: an ExitCode.
        step: last completed one.
        time: seconds since 1970.
        node: rank of the node.
        parent: PID of its torchrun.
    """

    rank: int
    pid: int
    state: RankState
    code: int
    step: int | None
    time: float
    node: int
    parent: int = 0
    host: str
    machine: str
    error: RankError | None = None


class AttemptRecord(Record):
    """A line of attempts.jsonl: one attempt that has ended.

    Attributes:
        code: an ExitCode.
        invocation: unique ID of one command, or of one flow run; all its attempts share it. None:
            the plan of the attempt was damaged.
        checkpoint_step: of the newest checkpoint at the end.
        seconds: from start to end.
        step: last completed one, if known.
    """

    attempt: int
    kind: EndKind
    code: int
    invocation: str | None = None
    message: str | None = None
    from_step: int | None = None
    checkpoint_step: int | None = None
    seconds: float | None = None
    step: int | None = None
    error: RankError | None = None


class Endpoint(Record):
    """The content of an attempt's rendezvous.json: where torchrun of node 0 listens for the others.

    Attributes:
        host: name of node 0.
    """

    address: str
    port: int
    host: str
