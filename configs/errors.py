"""The errors a user meets, each with the exit code that says who acts on it (docs/resume.md)."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

NO_SPACE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class PipelineError(Exception):
    """A sentence for the user and an exit code for the supervisor; never a traceback."""

    exit_code = 70


class ConfigError(PipelineError):
    """A setting is wrong: nobody retries; the message names the key, its value and what is allowed."""

    exit_code = 64


class DataError(PipelineError):
    """Text, dataset or tokenizer is missing, damaged or unusable: training never starts on it."""

    exit_code = 65


class TrainFailed(PipelineError):
    """Workers ended without finishing; where `retryable`, another call resumes from the newest good checkpoint."""

    def __init__(self, message: str, exit_code: int = 70, retryable: bool = True) -> None:
        super().__init__(message)
        self.exit_code, self.retryable = exit_code, retryable


class Preempted(PipelineError):
    """Training was asked to stop and saved a checkpoint; the same command carries on."""

    exit_code = 75


def no_space(error: BaseException, what: str = "") -> str | None:
    """The sentence where `error` says that a disk is full or a quota used up; None where it says something else.

    Args:
        what: could not be written; where it is empty, the file that the error names.
    """
    if not isinstance(error, OSError) or error.errno not in NO_SPACE:
        return None
    what = what or (f"'{error.filename}'" if error.filename else "a file")
    return f"no space to write {what} ({os.strerror(error.errno or 0)}); free space and run the same command again."


@contextmanager
def told_when_full(what: str, kind: type[PipelineError] = PipelineError) -> Iterator[None]:
    """Turns a full disk that is met inside into its sentence, an error of this `kind`; `what` is written there."""
    try:
        yield
    except OSError as error:
        if sentence := no_space(error, what):
            raise kind(sentence) from error
        raise
