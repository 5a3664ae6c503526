"""How an attempt ended, read from the ranks' status files first and torchrun's exit code second."""

from dataclasses import dataclass, field

# What a rank reports when another one vanished; the vanished one is the cause, not this.
PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Socket closed", "NCCL", "gloo", "Broken pipe")


@dataclass(frozen=True)
class Outcome:
    """kind: done | preempted | failed; code: of docs/resume.md; message: a sentence; step: last completed one, if known;
    details: the failed rank's error in full.
    """

    kind: str
    code: int
    message: str
    step: int | None = None
    details: dict = field(default_factory=dict)


def classify(returncode: int, statuses: list[dict | None], log_folder: str) -> Outcome:
    """The end of one attempt.

    Args:
        returncode: torchrun's; 1 for anything that went wrong in a worker, negative for a signal to torchrun itself.
        statuses: the last word of each rank, None where there is none.
        log_folder: named in the message, for people.
    """
    words = [status for status in statuses if status]
    if len(words) == len(statuses) and all(status["state"] == "done" for status in words):
        return Outcome("done", 0, "finished", words[0]["step"])
    failed = sorted((status for status in words if status["state"] == "failed"), key=lambda status: status["time"])
    own = [status for status in failed if not _peer_lost(status)]
    if own:
        return _failed(own[0], log_folder)
    silent = [rank for rank, status in enumerate(statuses) if status is None or status["state"] == "running"]
    preempted = [status for status in words if status["state"] == "preempted"]
    if preempted and not failed and not silent:
        return Outcome(
            "preempted", 75, f"saved a checkpoint and stopped at step {preempted[0]['step']}", preempted[0]["step"]
        )
    if silent and returncode < 0:
        return Outcome("failed", 70, f"torchrun was ended by signal {-returncode}; logs are in {log_folder}.")
    if silent and all(status is None for status in statuses):
        return Outcome(
            "failed", 70, f"no worker started (torchrun ended with {returncode}); see {log_folder}/torchrun.log."
        )
    if silent:
        ranks = ", ".join(str(rank) for rank in silent)
        return Outcome(
            "failed",
            70,
            f"rank {ranks} ended without a word (killed from outside, or out of memory); logs are in {log_folder}.",
        )
    if failed:
        return _failed(failed[0], log_folder)
    return Outcome(
        "failed",
        70,
        f"torchrun ended with {returncode} although its workers had finished; see {log_folder}/torchrun.log.",
    )


def _failed(status: dict, log_folder: str) -> Outcome:
    error = status["error"]
    message = (
        f"rank {status['rank']}: {error['type']}: {error['message']} (log: {log_folder}/rank-{status['rank']}.log)"
    )
    return Outcome("failed", status["code"], message, status["step"], error)


def _peer_lost(status: dict) -> bool:
    return any(mark in status["error"]["message"] for mark in PEER_LOST)
