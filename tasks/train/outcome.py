"""The end of an attempt, from all that is known of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infini_llama.configs.errors import (
    ConfigError,
    DataError,
    ExitCode,
    PipelineError,
    TrainFailed,
)
from infini_llama.tasks.records.status import EndKind, RankError, RankStatus


@dataclass(frozen=True)
class Evidence:
    """All that is known of an attempt whose workers have ended.

    Attributes:
        returncode: of torchrun; 1 for anything that went wrong in a worker, negative for a signal
            to torchrun itself.
        statuses: of each rank, None if it wrote none.
        log_folder: named in the message, for people.
        hint: why no worker may have started.
        crashes: the signal of a rank that crashed, in words, by the rank.
        hang: which rank hung, if one did.
        fault: what went wrong in this process while it watched.
        stop_request: what asked this process to stop (Ctrl-C, SIGTERM, Prefect's cancellation).
    """

    returncode: int
    statuses: Sequence[RankStatus | None]
    log_folder: str
    hint: str = ""
    crashes: Mapping[int, str] = field(default_factory=dict[int, str])
    hang: str | None = None
    fault: Exception | None = None
    stop_request: BaseException | None = None


@dataclass(frozen=True)
class Outcome:
    """The end of one attempt.

    Attributes:
        code: an ExitCode.
        step: last completed one, if known.
        culprit: the rank whose failure ended the attempt, if one reported it.
        error: of the culprit.
    """

    kind: EndKind
    code: int
    message: str
    step: int | None = None
    culprit: int | None = None
    error: RankError | None = None


def outcome_of(evidence: Evidence) -> Outcome:
    """The end of an attempt, by the first of these that holds:

    1. The ranks have finished, or one of them reported a failure of its own; everything else that
       was seen is a consequence.
    2. A rank hung, and the others did not save: HUNG.
    3. This process failed while it watched: UNEXPECTED.
    4. A stop was requested before any rank could save or report: PREEMPTED.
    5. The statuses of the ranks and torchrun's exit code.
    """
    reported = _reported(evidence)
    if reported.kind == "done" or reported.culprit is not None:
        return reported
    if evidence.hang and reported.kind == "failed":
        return Outcome("failed", ExitCode.HUNG, evidence.hang)
    if evidence.fault is not None:
        message = f"watching the workers failed: {evidence.fault!r}"
        return Outcome("failed", ExitCode.UNEXPECTED, message, reported.step)
    if evidence.stop_request is not None and reported.code == ExitCode.UNEXPECTED:
        return Outcome(
            "preempted",
            ExitCode.PREEMPTED,
            "stopped on request, without a checkpoint",
            reported.step,
        )
    return reported


def outcome_of_start(fault: Exception) -> Outcome:
    """The end of an attempt whose workers could not be started."""
    if isinstance(fault, PipelineError):
        return Outcome("failed", fault.exit_code, str(fault))
    message = f"starting the workers failed: {fault!r}"
    return Outcome("failed", ExitCode.UNEXPECTED, message)


def _reported(evidence: Evidence) -> Outcome:
    """The end of an attempt by the ranks' statuses and torchrun's exit code alone."""
    returncode = evidence.returncode
    statuses = evidence.statuses
    logs = evidence.log_folder
    written = [status for status in statuses if status]
    if len(written) == len(statuses) and all(
        status.state == "done" for status in written
    ):
        return Outcome("done", ExitCode.FINISHED, "finished", written[0].step)
    failed = sorted(
        (status for status in written if status.state == "failed"),
        key=lambda status: status.time,
    )
    causes = [
        status for status in failed if not (status.error and status.error.peer_lost)
    ]
    if causes:
        return _failed(causes[0], logs)
    silent = [
        rank
        for rank, status in enumerate(statuses)
        if status is None or status.state == "running"
    ]
    preempted = [status for status in written if status.state == "preempted"]
    if preempted and not failed and not silent:
        step = preempted[0].step
        message = "stopped before the first step"
        if step:
            message = f"saved a checkpoint and stopped at step {step}"
        return Outcome("preempted", ExitCode.PREEMPTED, message, step)
    if failed and not silent:
        return _failed(failed[0], logs)
    crashed = [rank for rank in silent if rank in evidence.crashes]
    if crashed:
        rank = crashed[0]
        message = f"rank {rank} crashed ({evidence.crashes[rank]}); see {logs}/rank-{rank}.log."
    elif silent and returncode < 0:
        message = f"torchrun was killed by signal {-returncode}; logs are in {logs}."
    elif silent and not written:
        hint = f": {evidence.hint.rstrip('.')}" if evidence.hint else ""
        message = (
            f"no worker started (torchrun exited with {returncode}){hint}; "
            f"see {logs}/torchrun.log."
        )
    elif silent:
        ranks = ", ".join(map(str, silent))
        message = (
            f"rank {ranks} ended without an error report "
            "(killed from outside, perhaps by the kernel for lack of memory); "
            f"logs are in {logs}."
        )
    else:
        message = (
            f"torchrun exited with {returncode} although its workers had finished; "
            f"see {logs}/torchrun.log."
        )
    return Outcome("failed", ExitCode.UNEXPECTED, message)


def _failed(status: RankStatus, log_folder: str) -> Outcome:
    error = status.error or RankError(type="unknown", message="it did not report why")
    log = f"{log_folder}/rank-{status.rank}.log"
    message = f"rank {status.rank}: {error.message} (log: {log})"
    return Outcome(
        "failed", status.code, message, status.step, status.rank, status.error
    )


def error_of(outcome: Outcome) -> PipelineError:
    """The exception for an attempt after which the stage makes no other."""
    if outcome.code == ExitCode.INVALID_CONFIG:
        return ConfigError(outcome.message)
    if outcome.code == ExitCode.INVALID_DATA:
        return DataError(outcome.message)
    return TrainFailed(outcome.message, exit_code=outcome.code)
