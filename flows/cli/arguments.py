"""The argument parser of the command line: grouped help, suggestions for unknown commands, checked values."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from infini_llama.configs.durations import COUNT, count
from infini_llama.configs.errors import ConfigError


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of each option that has one and does not state it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        if (
            not action.option_strings
            or action.default in (None, False, [], argparse.SUPPRESS)
            or "default" in (text or "")
        ):
            return text
        return f"{text or ''} (default: %(default)s)".strip()


class Parser(argparse.ArgumentParser):
    """argparse with exit code 64 for invalid arguments, and `overview` in place of a flat list of commands."""

    def __init__(self, *arguments: Any, overview: str = "", **options: Any) -> None:
        super().__init__(*arguments, formatter_class=Formatter, **options)
        self.overview = overview

    def format_help(self) -> str:
        return self.overview or super().format_help()

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ConfigError.exit_code, f"{self.prog}: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action.choices, dict) and value not in action.choices:  # the commands
            raise argparse.ArgumentError(None, unknown_command(value, list(action.choices)))
        super()._check_value(action, value)


def unknown_command(name: str, commands: Sequence[str]) -> str:
    """Message for a command that does not exist, with the most similar one."""
    similar = difflib.get_close_matches(name, commands, n=1)
    hint = f"did you mean {similar[0]}?" if similar else "'infini-llama help' lists the commands."
    return f"unknown command '{name}'; {hint}"


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    return next(dict(action.choices) for action in parser._actions if isinstance(action.choices, dict))


class Version(argparse.Action):
    """Print the version of the installed package."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"infini-llama {version('infini-llama')}")
        parser.exit()


def at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def at_least_zero(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return number


def seed(text: str) -> int:
    if not 0 <= (number := int(text)) < 2**63:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 2^63 - 1")
    return number


def tokens(text: str) -> int:
    """A number of tokens, such as 4096, 128k or 1M."""
    written = text[:-1] + text[-1:].replace("m", "M")
    if not re.fullmatch(COUNT, written):
        raise argparse.ArgumentTypeError(f"{text} is not a number of tokens such as 4096, 128k or 1M")
    return at_least_one(str(count(written)))


def at_least_two(text: str) -> int:
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(
            f"{text} must be at least 2, so that there is another one if the newest is damaged"
        )
    return number


def not_negative(text: str) -> float:
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must not be negative, infinite or nan")
    return number


def above_zero(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and finite")
    return number


def share(text: str) -> float:
    if not 0 < (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return number


def share_or_zero(text: str) -> float:
    if not 0 <= (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 1")
    return number


def some_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the text must not be empty")
    return text
