"""How an attempt ended, read from the ranks' status files first and torchrun's exit code second."""

from collections.abc import Sequence
from dataclasses import dataclass

from infini_llama.configs.errors import ExitCode
from infini_llama.tasks.records.status import EndKind, RankError, RankStatus


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


def classify(returncode: int, statuses: Sequence[RankStatus | None], log_folder: str, hint: str = "") -> Outcome:
    """The end of one attempt.

    Args:
        returncode: torchrun's; 1 for anything that went wrong in a worker, negative for a signal to torchrun itself.
        statuses: of each rank, None if it wrote none.
        log_folder: named in the message, for people.
        hint: why no worker may have started.
    """
    found = [status for status in statuses if status]
    if len(found) == len(statuses) and all(status.state == "done" for status in found):
        return Outcome("done", ExitCode.FINISHED, "finished", found[0].step)
    failed = sorted((status for status in found if status.state == "failed"), key=lambda status: status.time)
    own = [status for status in failed if not (status.error and status.error.peer_lost)]
    if own:
        return _failed(own[0], log_folder)
    silent = [rank for rank, status in enumerate(statuses) if status is None or status.state == "running"]
    preempted = [status for status in found if status.state == "preempted"]
    if preempted and not failed and not silent:
        return Outcome(
            "preempted",
            ExitCode.PREEMPTED,
            f"saved a checkpoint and stopped at step {preempted[0].step}",
            preempted[0].step,
        )
    if silent and returncode < 0:
        return Outcome(
            "failed", ExitCode.UNEXPECTED, f"torchrun was killed by signal {-returncode}; logs are in {log_folder}."
        )
    if silent and all(status is None for status in statuses):
        return Outcome(
            "failed",
            ExitCode.UNEXPECTED,
            f"no worker started (torchrun exited with {returncode}){hint and f': {hint}'}; see {log_folder}/torchrun.log.",
        )
    if silent:
        ranks = ", ".join(str(rank) for rank in silent)
        return Outcome(
            "failed",
            ExitCode.UNEXPECTED,
            f"rank {ranks} ended without an error report (killed from outside, perhaps by the kernel for lack of memory); logs are in "
            f"{log_folder}.",
        )
    if failed:
        return _failed(failed[0], log_folder)
    return Outcome(
        "failed",
        ExitCode.UNEXPECTED,
        f"torchrun exited with {returncode} although its workers had finished; see {log_folder}/torchrun.log.",
    )


def _failed(status: RankStatus, log_folder: str) -> Outcome:
    error = status.error or RankError(type="unknown")
    log = f"{log_folder}/rank-{status.rank}.log"
    message = f"rank {status.rank}: {error.type}: {error.message} (log: {log})"
    return Outcome("failed", status.code, message, status.step, status.rank, status.error)
