"""The `infini-llama` command: arguments in, exit code out. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from infini_llama.configs.errors import ConfigError, ExitCode, PipelineError, Preempted, escaped, no_space
from infini_llama.flows.cli.parser import build_parser, subcommands, unknown_command
from infini_llama.tasks.runs.signals import debounced, hangup_as_termination

if TYPE_CHECKING:
    from infini_llama.configs.reading import JsonObject
    from infini_llama.flows.cli.console import Answer

DOTTED = re.compile(r"--[a-z]\w*(\.\w+)+=")
BROKEN_PIPE = 128 + signal.SIGPIPE


class Stopped(BaseException):
    """SIGTERM or SIGHUP: save and end, like Ctrl-C."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options and key=value may be in any order; --section.key=value is section.key=value."""
    parser = build_parser()
    parsed, rest = parser.parse_known_args(arguments)
    if "overrides" in parsed:
        rest = [word[2:] if DOTTED.match(word) else word for word in rest]
    unknown = [word for word in rest if word.startswith("-") or "=" not in word or "overrides" not in parsed]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hints(unknown, parsed)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def _hints(unknown: list[str], parsed: argparse.Namespace) -> str:
    """Hints for other programs' options, for commands that take key=value."""
    if "overrides" not in parsed:
        return ""
    from infini_llama.configs import other_names
    from infini_llama.configs.keys import nearest

    hints = []
    for option in dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("-")):
        name = option.lstrip("-").lower().replace("-", "_")
        meant = [f"{key}=VALUE" for key in nearest((name,))]
        if hint := other_names.OPTIONS.get(name) or (meant and f"write {' or '.join(meant)}"):
            hints.append(f"\n  {option}: {hint}")
    return "".join(hints)


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(arguments)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGTERM, debounced(Stopped))
    hangup_as_termination()
    try:
        with _console(parsed):
            record, text = commands()[parsed.command](parsed)
        _say(text, parsed, record)
        code = ended if isinstance(ended := record.get("exit_code", 0), int) else 0
    except SystemExit:
        raise
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except BaseException as error:
        code, sentence = explain(error)
        if parsed.verbose:
            traceback.print_exception(error)
        print(f"infini-llama: {escaped(sentence)}", file=sys.stderr)
        if parsed.json:
            print(json.dumps({"error": sentence, "exit_code": code}), flush=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code


def commands() -> dict[str, Callable[[argparse.Namespace], Answer]]:
    """One function per command: arguments in, a record for --json and text out."""
    from infini_llama.flows.cli import init, models, runs, serve, stages

    return {
        "compare": runs.compare,
        "completion": completion,
        "deploy": serve.deploy,
        "doctor": stages.doctor,
        "estimate": stages.estimate,
        "evaluate": models.evaluate,
        "export": models.export,
        "gc": runs.gc,
        "generate": models.generate,
        "help": help_text,
        "import": models.import_folder,
        "init": init.init,
        "join": stages.join,
        "preprocess": stages.preprocess,
        "report": runs.report,
        "run": stages.run,
        "runs": runs.runs,
        "serve": serve.serve,
        "train": stages.train,
        "verify": stages.verify,
    }


def completion(arguments: argparse.Namespace) -> Answer:
    import shtab

    script = shtab.complete(arguments.parser, arguments.shell)
    return {"shell": arguments.shell, "script": script}, script


def help_text(arguments: argparse.Namespace) -> Answer:
    """The top-level help, or that of one command."""
    known = subcommands(arguments.parser)
    if arguments.topic is not None and arguments.topic not in known:
        raise ConfigError(unknown_command(arguments.topic, list(known)))
    text = (known[arguments.topic] if arguments.topic else arguments.parser).format_help().rstrip()
    return {"help": text}, text


@contextlib.contextmanager
def _console(parsed: argparse.Namespace) -> Iterator[None]:
    from infini_llama.flows.cli import console

    handler = console.attach(parsed.quiet, parsed.verbose)
    try:
        yield
    finally:
        console.detach(handler)


def _say(text: str, parsed: argparse.Namespace, record: JsonObject) -> None:
    if text and not (parsed.json and parsed.quiet):
        print(escaped(text), file=sys.stderr if parsed.json else sys.stdout, flush=True)
    if parsed.json:
        print(json.dumps(record), flush=True)


def explain(error: BaseException) -> tuple[int, str]:
    """Exit code and one sentence for whatever ended a command."""
    if isinstance(error, PipelineError):
        return error.exit_code, str(error)
    if isinstance(error, (KeyboardInterrupt, Stopped)):
        if (preempted := _behind(error)) is not None:
            return preempted.exit_code, str(preempted)
        code = 128 + (signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        return code, "stopped; everything committed is kept, and the same command resumes."
    if sentence := no_space(error):
        return ExitCode.UNEXPECTED, sentence
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        where = error.filename or "a file"
        return ConfigError.exit_code, (
            f"no permission to use {where} ({os.strerror(error.errno)}); change it, or name another folder "
            "(runtime.home, INFINI_LLAMA_HOME, --output)."
        )
    words = next(iter(str(error).splitlines()), "").rstrip(".")
    return (
        ExitCode.UNEXPECTED,
        f"unexpected {type(error).__name__}: {words}. --verbose prints the traceback; the same command can be tried again.",
    )


def _behind(error: BaseException) -> Preempted | None:
    """The report of the training stage behind an interruption, which Prefect passes on as the signal that it was."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        if isinstance(following, Preempted):
            return following
        seen.append(following)
        following = following.__cause__ or following.__context__
    return None


if __name__ == "__main__":
    sys.exit(main())
