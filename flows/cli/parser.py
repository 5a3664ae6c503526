"""The commands, their options and their help: argparse with grouped help, checked values, and hints for unknown commands."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from infini_llama.configs.durations import COUNT, count
from infini_llama.configs.errors import ConfigError

# Heading, an example, and the commands: description, and the title of the page of the documentation.
GROUPS = (
    (
        "Pipeline",
        "infini-llama run tiny train.max_steps=500",
        {
            "init": ("write a commented configuration for your text and this machine", "Quickstart"),
            "run": ("run the whole pipeline; run it again to resume", "Quickstart"),
            "preprocess": ("build the dataset of a configuration", "Data"),
            "verify": ("verify a dataset", "Data"),
            "train": ("train on a dataset that is already built", "Checkpoints and resume"),
            "join": ("join a multi-node run with this machine", "Several machines, Slurm, Kubernetes"),
        },
    ),
    (
        "Results",
        'infini-llama generate tiny --prompt "import os"',
        {
            "runs": ("list all runs with state, step, losses and size", "Metrics, reports and clean-up"),
            "report": (
                "describe a run or dataset; write the page of a run (also during training)",
                "Metrics, reports and clean-up",
            ),
            "compare": ("compare runs: settings, results and curves", "Metrics, reports and clean-up"),
            "generate": ("generate text from prompts", "Model"),
            "evaluate": ("measure perplexity or passkey retrieval", "Evaluation"),
            "export": ("export a trained model to a Hugging Face folder", "Hugging Face import and export"),
            "import": ("write a configuration that starts from a Hugging Face Llama", "Hugging Face import and export"),
        },
    ),
    (
        "Prefect",
        "infini-llama serve tiny",
        {
            "serve": ("start a Prefect server with UI, deployments and a worker", "Prefect"),
            "deploy": ("create or update deployments on the server PREFECT_API_URL", "Prefect"),
        },
    ),
    (
        "Tools",
        "infini-llama doctor tiny",
        {
            "doctor": ("check this machine and print a fix for each problem", "Environment and tuning"),
            "estimate": ("estimate parameters, FLOPs and memory of a run", "Estimate memory and compute"),
            "gc": ("list old and unused files; --yes deletes them", "Metrics, reports and clean-up"),
            "completion": ("print a shell completion script", "Quickstart"),
            "help": ("print this help, or the help of a command", "Quickstart"),
        },
    ),
)
# What replaces commands that no longer exist.
REPLACED = {
    "passkey": "evaluate RUN --passkey",
    "inspect": "report RUN_OR_DATASET",
    "config": "run CONFIG --dry-run",
}
EXIT_CODES = """Exit codes:
    0  success
    1  warnings (doctor --strict)
   64  invalid configuration or arguments
   65  invalid data
   70  unexpected or repeated failure
   71  out of memory, and the micro-batch cannot be halved
   72  loss or gradient not finite, also after rollbacks
   75  training was stopped; run the command again to resume
   76  a rank hung, also after retries
  130, 143  stopped before or after training"""
EVERY = """Set any key of the configuration with section.key=value, for example
train.max_steps=500. Every command has --json (one JSON object on stdout),
--quiet and --verbose."""

Add = Callable[[str], "Parser"]  # a command by its name


def overview() -> str:
    """The top-level help: commands by group, each group with an example."""
    lines = [
        "usage: infini-llama COMMAND [CONFIG] [key=value …] [options]",
        "",
        "Raw text to a trained Llama or Infini-Llama.",
    ]
    for heading, example, commands in GROUPS:
        lines += ["", heading, *(f"  {name:<11} {words}" for name, (words, _) in commands.items())]
        lines += [f"  Example: {example}"]
    lines += [
        "",
        EVERY,
        "'infini-llama help COMMAND' prints the options of a command.",
        "",
        EXIT_CODES,
    ]
    return "\n".join(lines) + "\n"


def build_parser() -> Parser:
    """The parser of the whole command line."""
    every = Parser(add_help=False)
    every.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout; all other output goes to stderr"
    )
    every.add_argument("--quiet", action="store_true", help="print only warnings and the result")
    every.add_argument("--verbose", action="store_true", help="print more log lines, and tracebacks of errors")

    parser = Parser(prog="infini-llama", overview=overview())
    parser.add_argument("--version", action=Version, help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    described = {name: about for *_, group in GROUPS for name, about in group.items()}

    def add(name: str) -> Parser:
        words, page = described[name]
        about, more = f"{words[0].upper()}{words[1:]}.", f'Documentation: the page "{page}"'
        return commands.add_parser(name, help=words, description=about, parents=[every], epilog=more)

    _pipeline(add)
    _results(add)
    _models(add)
    _tools(add, parser)
    return parser


def _configured(parser: Parser, nargs: str | None = None) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs=nargs,
        help="a YAML or JSON file, or the name of a ready-made one such as tiny",
    )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="override of a key, for example train.max_steps=500",
    )


def _run(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="name or path of a run")


def _checkpoint(parser: Parser) -> None:
    parser.add_argument("--checkpoint", default="latest", help="latest, best, or the name of a checkpoint")


def _deployed(parser: Parser, nargs: str) -> None:
    parser.add_argument("configs", metavar="CONFIG", nargs=nargs, help="YAML or JSON file; one deployment per file")
    parser.add_argument("--gpus", type=at_least_one, metavar="N", help="GPU limit for all runs together")


def _pipeline(add: Add) -> None:
    init = add("init")
    init.add_argument("output", metavar="FILE", nargs="?", default="my.yaml", help="file to write (default: my.yaml)")
    init.add_argument(
        "--files", action="append", default=[], metavar="PATH", help="your text: file, folder or glob; can be repeated"
    )
    init.add_argument("--from", dest="model", metavar="MODEL",
                      help="continue the training of a Llama: a name on the Hugging Face Hub, or a folder")  # fmt: skip
    init.add_argument(
        "--attention", choices=["softmax", "infini"], help="infini: Infini-attention (default: softmax, or as in MODEL)"
    )
    init.add_argument(
        "--tokens", type=number, metavar="N", help="tokens to train on, such as 300M (default: by the text)"
    )
    init.add_argument(
        "--parameters", type=number, metavar="N", help="size of the model, such as 30M (default: by the text)"
    )
    init.add_argument(
        "--hours", type=above_zero, metavar="H", help="training time, at an assumed speed of this machine (default: 24)"
    )
    run = add("run")
    _configured(run)
    run.add_argument("--no-prefect", action="store_true", help="run the same stages without Prefect")
    run.add_argument("--direct", dest="no_prefect", action="store_true", help=argparse.SUPPRESS)
    run.add_argument("--dry-run", action="store_true",
                     help="only print the resolved configuration, the plan, the parameters and what is already built")  # fmt: skip
    preprocess = add("preprocess")
    _configured(preprocess)
    preprocess.add_argument("--repair", action="store_true", help="verify all checksums and rebuild only damaged files")
    verify = add("verify")
    verify.add_argument("dataset", metavar="DATASET", help="name or path of a dataset")
    verify.add_argument(
        "--deep", action="store_true", help="verify every checksum, token and sequence, and print samples"
    )
    verify.add_argument("--html", metavar="FILE", help="also write the checks and statistics as an HTML page")
    train = add("train")
    _configured(train)
    train.add_argument(
        "--dataset", metavar="DATASET", help="name or path of the dataset (default: that of the configuration)"
    )
    join = add("join")
    join.add_argument("run", metavar="RUN", help="name of the run, or path of its folder (which can still be missing)")


def _results(add: Add) -> None:
    add("runs")
    report = add("report")
    report.add_argument("path", metavar="PATH", help="name or path of a run or a dataset")
    report.add_argument(
        "--html", metavar="FILE", help="write the page here (default of a run: report.html in its folder)"
    )
    report.add_argument("--open", action="store_true", help="open the page in a browser")
    compare = add("compare")
    compare.add_argument("runs", metavar="RUN", nargs="+", help="names or paths of runs")
    compare.add_argument("--html", metavar="FILE", help="also write an HTML page with the curves of all runs")
    evaluate = add("evaluate")
    _run(evaluate)
    _checkpoint(evaluate)
    evaluate.add_argument(
        "--files",
        action="append",
        default=[],
        metavar="PATH",
        help="text to evaluate on, as in data.files; can be repeated",
    )
    evaluate.add_argument(
        "--split",
        choices=["validation", "train"],
        help="split of the run's dataset, if there is no --files (default: validation)",
    )
    evaluate.add_argument("--sequences", type=at_least_one, metavar="N", help="only the first N sequences of the split")
    evaluate.add_argument(
        "--stream", action="store_true", help="read each file as one text with constant memory (not softmax)"
    )
    passkey = evaluate.add_argument_group("passkey retrieval")
    passkey.add_argument("--passkey", action="store_true",
                         help="instead of perplexity: retrieval of hidden numbers by length and depth")  # fmt: skip
    passkey.add_argument("--lengths", "--context", type=tokens, nargs="+", metavar="N",
                         help="lengths of the texts in tokens, such as 4096 or 1M (default: 1, 2, 4 and 8 sequence "
                              "lengths)")  # fmt: skip
    passkey.add_argument("--depths", type=share_or_zero, nargs="+", metavar="D",
                         help="positions of the number; 0: beginning, 1: end (default: 0 0.25 0.5 0.75 1)")  # fmt: skip
    passkey.add_argument("--segments", type=at_least_zero, nargs="+", metavar="N",
                         help="instead: segment boundaries between every token of the number and its answer")  # fmt: skip
    passkey.add_argument("--form", choices=["passkey", "facts", "overwritten", "variables"],
                         help="with --segments: what is hidden, as data.passkey.form (default: passkey)")  # fmt: skip
    passkey.add_argument("--filler", choices=["repeated", "random", "text"],
                         help="with --segments: the text around it; text: the run's own held-out text "
                              "(default: repeated)")  # fmt: skip
    passkey.add_argument("--samples", type=at_least_one, metavar="N", help="numbers per length and depth (default: 10)")
    passkey.add_argument("--seed", type=seed, metavar="S", help="seed of the numbers (default: 0)")


def _models(add: Add) -> None:
    generate = add("generate")
    _run(generate)
    _checkpoint(generate)
    generate.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="text to continue; can be repeated"
    )
    generate.add_argument(
        "--prompt-file", action="append", default=[], metavar="FILE", help="file with text to continue; can be repeated"
    )
    generate.add_argument(
        "--max-new-tokens", type=at_least_one, default=128, metavar="N", help="maximum number of generated tokens"
    )
    generate.add_argument(
        "--temperature",
        type=not_negative,
        default=0.8,
        metavar="T",
        help="sampling temperature; 0: always the most likely token",
    )
    generate.add_argument("--top-k", type=at_least_one, metavar="K", help="sample from the K most likely tokens")
    generate.add_argument(
        "--top-p", type=share, metavar="P", help="sample from the most likely tokens with this total probability"
    )
    generate.add_argument(
        "--min-p", type=share, metavar="P", help="sample from tokens at least P times as likely as the most likely one"
    )
    generate.add_argument(
        "--repetition-penalty", type=above_zero, default=1.0, metavar="R", help="above 1: fewer repetitions"
    )
    generate.add_argument(
        "--stop",
        action="append",
        type=some_text,
        default=[],
        metavar="TEXT",
        help="end the text at this string; can be repeated",
    )
    generate.add_argument("--no-memory", action="store_true", help="turn off Infini-attention's memory")
    generate.add_argument("--seed", type=seed, default=0, metavar="S", help="seed of the sampling")
    export = add("export")
    _run(export)
    _checkpoint(export)
    export.add_argument("--output", required=True, metavar="DIR", help="folder to write; it must not exist yet")
    export.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="type of the weights"
    )
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="maximum size of a weights file")
    bring = add("import")
    bring.add_argument("model", metavar="MODEL", help="name on the Hugging Face Hub, or folder with safetensors")
    bring.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub (default: main)")
    bring.add_argument("--output", metavar="FILE", help="file to write (default: <name of MODEL>.yaml)")
    bring.add_argument(
        "--attention", choices=["softmax", "infini"], help="infini: Infini-attention (default: as in the folder)"
    )
    bring.add_argument("--segment-length", type=at_least_one, metavar="N", help="tokens per segment (infini)")


def _tools(add: Add, parser: Parser) -> None:
    serve = add("serve")
    _deployed(serve, "+")
    serve.add_argument("--host", default="127.0.0.1", help="address of the server and UI")
    serve.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="name under which others reach the server, beside --host and localhost; repeat it for several",
    )
    serve.add_argument("--port", type=at_least_one, default=4200, help="port of the server and UI")
    serve.add_argument("--limit", type=at_least_one, default=1, metavar="N", help="maximum number of concurrent runs")
    _deployed(add("deploy"), "*")
    doctor = add("doctor")
    _configured(doctor, "?")
    doctor.add_argument(
        "--against", metavar="RUN", help="print what changed since RUN, and whether it would resume bitwise exactly"
    )
    doctor.add_argument("--strict", action="store_true", help="exit with 1 if there is a warning")
    _configured(add("estimate"))
    gc = add("gc")
    gc.add_argument("--yes", action="store_true", help="delete the files instead of listing them")
    gc.add_argument("--older-than", type=not_negative, default=1.0, metavar="DAYS", help="keep files younger than this")
    gc.add_argument("--keep-checkpoints", type=at_least_two, metavar="N",
                    help="also include all but the N newest checkpoints of each run; the best and permanent ones are kept")  # fmt: skip
    gc.add_argument(
        "--unused-datasets",
        action="store_true",
        help="also include datasets that no run in this home folder was trained on",
    )
    completion = add("completion")
    completion.add_argument("shell", choices=["bash", "zsh", "fish"], help="your shell")
    completion.set_defaults(parser=parser)
    help_parser = add("help")
    help_parser.add_argument("topic", metavar="COMMAND", nargs="?", help="command to describe")
    help_parser.set_defaults(parser=parser)


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
    if name in REPLACED:
        return f"unknown command '{name}'; use 'infini-llama {REPLACED[name]}'"
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


def at_least_zero(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return number


def number(text: str) -> int:
    """A whole number of at least 1, such as 4096, 30M or 1.5B."""
    if not (written := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMbBgG]?)", text)):
        raise argparse.ArgumentTypeError(f"{text} is not a number such as 4096, 30M or 1.5B")
    unit = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}[written[2].lower()]
    return at_least_one(str(round(float(written[1]) * unit)))


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
