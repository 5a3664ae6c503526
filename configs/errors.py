"""The errors that a user sees, their exit codes, and what follows each of them."""

import errno
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

NO_SPACE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# Answers for a file that may be whole, and can be had later: limits, and file servers.
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT)
# All control characters but tabs and line ends; characters that turn the direction of writing;
# bytes of file names that are not UTF-8.
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escaped(text: str) -> str:
    """Foreign text, safe for a terminal.

    Control characters become escape sequences such as \\x1b.
    """
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shown_url(url: str) -> str:
    """A URL for messages, without its password.

    A URL of HTTP is also without its query, which may hold a signature.
    """
    without_query = url.split("?")[0] if url.startswith("http") else url
    return re.sub(r"(://[^/:@]*):[^/]*@", r"\1:***@", without_query)


def shown_path(path: object) -> str:
    """A path for messages, also one whose bytes are no UTF-8, or control characters."""
    return escaped(portable(str(path)))


def url_error_message(fault: BaseException, url: str) -> str:
    """The kind and the words of an error about a URL, for messages.

    They are one short line, with the URL as `shown_url` has it.
    """
    return one_line(f"{type(fault).__name__}: {fault}".replace(url, shown_url(url)))


def one_line(fault: object) -> str:
    """The words of a library's error as a part of a sentence.

    They are on one line, and cut where there are very many.
    """
    return " ".join(str(fault).split())[:200]


def portable(name: str) -> str:
    """The name of a file as text; its bytes may be no UTF-8."""
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")


class ExitCode(IntEnum):
    """The ways in which a command or a worker ends."""

    FINISHED = 0
    INVALID_CONFIG = 64
    INVALID_DATA = 65
    UNEXPECTED = 70
    OUT_OF_MEMORY = 71
    DIVERGED = 72
    PREEMPTED = 75
    HUNG = 76


@dataclass(frozen=True)
class Ending:
    """An exit code in words.

    Attributes:
        cause, action: for people; the table of docs/resume.md is written from them.
        of_command: what the help says of a command that ended so; "": the cause.
        should_requeue: whether a scheduler is to start the command again; not where it would end
            the same way.
    """

    cause: str
    action: str
    of_command: str = ""
    should_requeue: bool = True


ENDINGS = {
    ExitCode.FINISHED: Ending(
        cause="finished",
        action="None. Running the command again only prints the result.",
        of_command="success",
        should_requeue=False,
    ),
    ExitCode.INVALID_CONFIG: Ending(
        cause="invalid configuration or arguments",
        action="Not retried. The error names the key.",
        should_requeue=False,
    ),
    ExitCode.INVALID_DATA: Ending(
        cause="invalid data: missing, damaged, or a different dataset",
        action="Not retried. The error names the file and the command that repairs it.",
        should_requeue=False,
    ),
    ExitCode.UNEXPECTED: Ending(
        cause="unexpected error, killed worker, killed torchrun",
        action="After a failed attempt, a full disk or an unexpected exception, training is "
        "retried: by the Prefect task, or with `--no-prefect` in a loop. Other errors found before "
        "the attempt, such as a run that another command trains, are not retried.",
        of_command="unexpected error, also after retries",
    ),
    ExitCode.OUT_OF_MEMORY: Ending(
        cause="out of memory",
        action="Another attempt at once, with half the micro-batch and the same global batches in "
        "the same order, until it cannot be halved. `runtime.retries` does not count it.",
        of_command="out of memory, and the micro-batch cannot be halved",
    ),
    ExitCode.DIVERGED: Ending(
        cause="loss, gradient or weights not finite",
        action="Rolled back at most `runtime.max_rollbacks` times.",
        of_command="loss, gradient or weights not finite, also after rollbacks",
        should_requeue=False,
    ),
    ExitCode.PREEMPTED: Ending(
        cause="stopped by a signal or by Prefect",
        action="A checkpoint at the end of the step. After SIGTERM, SIGHUP or SIGUSR1 to torchrun "
        "or a worker, training then continues immediately, and no failure is counted, unless there "
        "is no newer checkpoint than the attempt began with: that is retried as 70 is. After "
        "SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU or Ctrl-C to the command, or a cancellation in "
        "Prefect, the command ends within the grace period; run it again to resume.",
        of_command="stopped; run the command again to resume",
    ),
    ExitCode.HUNG: Ending(
        cause="hung rank",
        action="Retried as 70 is. Before, the supervisor names the rank, writes the stacks of all "
        "ranks to their logs, and kills them.",
        of_command="hung rank, also after retries",
    ),
}


class PipelineError(Exception):
    """An error with a message for the user; a traceback is printed only with --verbose."""

    exit_code: int = ExitCode.UNEXPECTED


def error_message(error: BaseException) -> str:
    """The sentence of an error of this program; of another one its kind, too."""
    if isinstance(error, PipelineError):
        return str(error)
    return f"{type(error).__name__}: {error}"


class ConfigError(PipelineError):
    """A setting is invalid.

    It is not retried. The message names the key, its value and what is allowed.

    Args:
        message: a sentence; with `problems`, what they have in common.
        problems: a sentence for each of several settings, shown on lines of their own.
    """

    exit_code = ExitCode.INVALID_CONFIG

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        text = "\n  ".join([f"{message}:", *problems]) if problems else message
        super().__init__(text)
        self.problems = tuple(problems) or (message,)


class DataError(PipelineError):
    """Text, dataset or tokenizer is missing, damaged or unusable; training does not start on it."""

    exit_code = ExitCode.INVALID_DATA


class TokenizerFails(DataError):
    """A tokenizer cannot encode or decode something."""


@contextmanager
def tokenizer_faults() -> Generator[None]:
    """Turn errors and panics of `tokenizers` into TokenizerFails.

    Its errors have no narrower type than Exception.

    Raises:
        TokenizerFails: instead of them.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or is_panic(error):
            raise TokenizerFails(
                f"the tokenizer fails ({one_line(error)}); use another tokenizer."
            ) from None
        raise


def is_panic(error: BaseException) -> bool:
    """Whether this is a panic of a library written in Rust (tokenizers, gigatoken).

    A panic is no Exception.
    """
    return type(error).__name__ == "PanicException"


class TrainFailed(PipelineError):
    """An attempt ended without finishing.

    Where a retry follows its code, another call resumes from the newest valid checkpoint.
    """

    def __init__(self, message: str, exit_code: int = ExitCode.UNEXPECTED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Diverged(PipelineError):
    """Training cannot continue from its weights.

    Attributes:
        first_skip: the first step whose update was skipped, or after which the weights were not
            finite: a rollback starts before it.
        samples: consumed when training gave up.
    """

    exit_code = ExitCode.DIVERGED

    def __init__(self, message: str, first_skip: int, samples: int) -> None:
        super().__init__(
            f"{message}; lower train.learning_rate, or look at the samples named in the log."
        )
        self.first_skip = first_skip
        self.samples = samples


class Preempted(PipelineError):
    """Training was stopped on request; the same command resumes.

    It has a checkpoint of its last step, unless the attempt failed or the grace period ended first.
    """

    exit_code = ExitCode.PREEMPTED


def no_space(error: BaseException, what: str = "") -> str | None:
    """A sentence if `error` is a full disk or an exhausted quota; None for another error.

    Args:
        what: could not be written; where it is empty, the file that the error names.
    """
    if not isinstance(error, OSError) or error.errno not in NO_SPACE:
        return None
    if not what:
        what = f"'{error.filename}'" if error.filename else "a file"
    cure = "free space"
    if error.errno == errno.EFBIG:
        cure = (
            "raise the limit of a file's size (ulimit -f), or use another filesystem,"
        )
    return (
        f"no space to write {what} ({os.strerror(error.errno or 0)}); {cure} and run the same "
        "command again."
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this process, or a GPU, has no memory left.

    torch's errors are known by their names, without torch.
    """
    kind = type(error).__name__
    words = str(error)
    if kind == "AcceleratorError":  # a kernel's, or a library's own allocation on a GPU
        return "out of memory" in words
    # The last one is torch's on a CPU.
    return (
        isinstance(error, MemoryError)
        or kind == "OutOfMemoryError"
        or "can't allocate memory" in words
    )


@contextmanager
def disk_full_as(
    what: str, kind: type[PipelineError] = PipelineError
) -> Generator[None]:
    """Raise `kind`, which names `what`, if the disk is full while the block writes it."""
    try:
        yield
    except OSError as error:
        sentence = no_space(error, what)
        if sentence:
            raise kind(sentence) from error
        raise
