"""The `infini-llama` command: arguments in, exit code out.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import TextIO

from infini_llama.configs.errors import (
    ConfigError,
    ExitCode,
    PipelineError,
    Preempted,
    escaped,
    is_out_of_memory,
    no_space,
)
from infini_llama.flows.cli.commands import COMMANDS, build_parser, call
from infini_llama.tasks.runs.lost_requests import no_request_lost
from infini_llama.tasks.runs.signals import (
    STOP_SIGNALS,
    debounced,
    hangup_as_termination,
    time_limits_as_termination,
)

DOTTED = re.compile(r"--[a-z]\w*(\.\w+)+=")
STDERR = 2
# Paths that this user may not use, that lead through a file or in a circle, or whose name a file or
# a broken link has.
UNUSABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
BROKEN_PIPE = 128 + signal.SIGPIPE


def name_home() -> None:
    """Set HOME to /, as container runtimes do, if this user has no home folder.

    Neither the environment nor the password file has one then. Libraries look for it when they are
    imported, and fail without one.
    """
    if os.path.expanduser("~") == "~":  # noqa: PTH111  pathlib's raises
        os.environ["HOME"] = "/"


def open_streams() -> None:
    """Keep output from ending a command, whatever it goes to.

    A stream that the caller has closed (`>&-`) is /dev/null, else the next file opened, a record
    perhaps, would have its number, and children would write into it. A character that the
    terminal's encoding lacks (LC_ALL=C, ISO-8859-1) is shown as an escape, where Python raises.
    """
    number = os.open(os.devnull, os.O_RDWR)
    while number <= STDERR:
        os.set_inheritable(number, True)
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Stopped(BaseException):
    """A signal of `STOP_SIGNALS`: save and end, like Ctrl-C."""


def main(arguments: list[str] | None = None) -> int:
    open_streams()
    parsed = parse(arguments)
    name_home()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGTERM, debounced(Stopped))
    hangup_as_termination()
    time_limits_as_termination()
    try:
        Path.cwd()  # where it was removed, processes that are started there fail without a reason
        from infini_llama.flows.cli.console import shown_log

        with (
            no_request_lost(Stopped, KeyboardInterrupt),
            shown_log(parsed.quiet, parsed.verbose),
        ):
            record, text = call(parsed)
        if parsed.json:
            if text and not parsed.quiet:
                print_if_possible(escaped(text), sys.stderr)
            print(json.dumps(record), flush=True)
        elif text:
            print(escaped(text), flush=True)
        exit_code = record.get("exit_code")
        code = exit_code if isinstance(exit_code, int) else 0
    except SystemExit:
        raise
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except BaseException as error:
        code, sentence = explain(error, COMMANDS[parsed.command].is_resumed)
        if parsed.verbose:
            print_if_possible("".join(traceback.format_exception(error)), sys.stderr)
        print_if_possible(f"infini-llama: {escaped(sentence)}", sys.stderr)
        if parsed.json:
            print_if_possible(
                json.dumps({"error": sentence, "exit_code": code}), sys.stdout
            )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for stream in (sys.stdout, sys.stderr):
            print_if_possible("", stream, end="")
    return code


def print_if_possible(text: str, stream: TextIO, end: str = "\n") -> None:
    """Print `text`, and whatever was printed to `stream` before.

    Where its reader has left or its disk is full, the exit code alone remains. What was not written
    goes nowhere: Python would try once more at its end, and exit with 120.
    """
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the arguments.

    Options and key=value may be in any order; --section.key=value is section.key=value.
    """
    parser = build_parser()
    parsed, rest = parser.parse_known_args(arguments)
    if "overrides" in parsed:
        rest = _without_dashes(rest)
        # argparse takes a word with a space for no option.
        parsed.overrides = _without_dashes(parsed.overrides)
    unknown = [
        word
        for word in rest
        if word.startswith("-") or "=" not in word or "overrides" not in parsed
    ]
    if unknown:
        hints = _hints(unknown) if "overrides" in parsed else ""
        of_command = parser.of_commands[parsed.command]
        of_command.error(f"unrecognized arguments: {' '.join(unknown)}{hints}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def _without_dashes(words: list[str]) -> list[str]:
    """The words, with --section.key=value as section.key=value."""
    return [word[2:] if DOTTED.match(word) else word for word in words]


def _hints(unknown: list[str]) -> str:
    """Advice on what to write in place of other programs' options."""
    from infini_llama.configs import other_names

    hints = []
    for option in dict.fromkeys(
        word.partition("=")[0] for word in unknown if word.startswith("-")
    ):
        name = option.lstrip("-").lower().replace("-", "_")
        settings = " or ".join(f"{key}=VALUE" for key in other_names.nearest((name,)))
        hint = other_names.OPTIONS.get(name) or (settings and f"write {settings}")
        if hint:
            hints.append(f"\n  {option}: {hint}")
    return "".join(hints)


def _current_folder_is_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109  pathlib's is the same call
    except FileNotFoundError:
        return True
    return False


def explain(error: BaseException, is_resumed: bool) -> tuple[int, str]:
    """Exit code and one sentence for whatever ended a command.

    Args:
        is_resumed: of the command, see `Command`.
    """
    if isinstance(error, PipelineError):
        return error.exit_code, str(error)
    if isinstance(error, (KeyboardInterrupt, Stopped)):
        if not is_resumed:
            number = (
                signal.SIGINT
                if isinstance(error, KeyboardInterrupt)
                else signal.SIGTERM
            )
            return 128 + number, "stopped before its end; run the same command again."
        preempted = _preempted_behind(error)
        sentence = (
            "stopped; everything committed is kept, and the same command resumes."
        )
        return ExitCode.PREEMPTED, sentence if preempted is None else str(preempted)
    if sentence := no_space(error):
        return ExitCode.UNEXPECTED, sentence
    if isinstance(error, OSError) and error.errno in UNUSABLE:
        path = error.filename or "a file"
        if error.filename and Path(path).is_symlink() and not Path(path).exists():
            return ConfigError.exit_code, (
                f"{path} is a link to {Path(path).readlink()}, which does not exist; mount its "
                "disk, or correct the link."
            )
        return ConfigError.exit_code, (
            f"{path} cannot be used ({os.strerror(error.errno)}); change or remove it, or name "
            "another folder (runtime.home, INFINI_LLAMA_HOME, --output, --html)."
        )
    if isinstance(error, FileNotFoundError) and _current_folder_is_gone():
        return (
            ConfigError.exit_code,
            "the current folder has been removed; change to one that exists.",
        )
    words = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY, (
            f"out of memory ({words or type(error).__name__}); end other programs, or use a "
            "smaller model or fewer tokens at once."
        )
    return ExitCode.UNEXPECTED, (
        f"unexpected {type(error).__name__}: {words}. --verbose prints the traceback; the same "
        "command can be tried again."
    )


def _preempted_behind(error: BaseException) -> Preempted | None:
    """The training stage's report that caused an interruption.

    Under Prefect, the task of training has raised the signal itself, see tasks/train/task.py.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, Preempted):
            return cause
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None


if __name__ == "__main__":
    sys.exit(main())
