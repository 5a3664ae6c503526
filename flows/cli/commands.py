"""The commands with their functions, options and help in one table, and the parser made from it.

Nothing heavy is imported here: a command's module is imported when the command runs.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from infini_llama.configs.errors import ENDINGS, ConfigError
from infini_llama.model.config import LARGEST as LARGEST_SIZE

if TYPE_CHECKING:
    from infini_llama.flows.cli.console import Answer


# The largest number of an option, so that what is computed from it does not overflow.
LARGEST = 10**15
# Names and settings, as argparse's `add_argument` takes them.
Argument = tuple[Sequence[str], dict[str, Any]]


class Command(NamedTuple):
    """A command.

    Attributes:
        function: "module.function" in this package.
        is_resumed: after a request to stop, the same command goes on where it was; it exits with
            PREEMPTED, and others with the code of the signal.
    """

    help: str
    function: str
    arguments: tuple[Argument, ...]
    is_resumed: bool


def command(
    help: str, function: str, *arguments: Argument, is_resumed: bool = False
) -> Command:
    return Command(help, function, arguments, is_resumed)


def option(
    usage: str, help: str, *, repeated: bool = False, **settings: Any
) -> Argument:
    """An option.

    Args:
        usage: "--quiet" (a switch), "--seed S", or "--lengths --context N" (two names).
        repeated: can be given several times; the values are a list.
        settings: of `add_argument`; a default is added to the help.
    """
    names = re.findall(r"--[\w-]+", usage)
    metavar = usage.split()[-1]
    if not metavar.startswith("--"):
        settings["metavar"] = metavar
    elif "choices" not in settings:
        settings["action"] = "store_true"
    if "default" in settings:
        help = f"{help} (default: {settings['default']})"
    if repeated:
        settings |= {"action": "append", "default": []}
        help = f"{help}; can be repeated"
    return names, settings | {"help": help}


def argument(name: str, metavar: str, help: str, **settings: Any) -> Argument:
    """A positional argument."""
    return [name], settings | {"metavar": metavar, "help": help}


def number(
    kind: type[int] | type[float],
    least: int,
    most: float = LARGEST,
    *,
    above: bool = False,
) -> Callable[[str], float]:
    """The type of a numeric option.

    Args:
        least: smallest value; with `above`, every value must be larger.
    """

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not abs(value) < math.inf:
            raise argparse.ArgumentTypeError(
                f"{text} is not a {'whole' if kind is int else 'finite'} number"
            )
        if not least <= value <= most or (above and value == least):
            upper = f" and at most {most}" if most != LARGEST or value > most else ""
            raise argparse.ArgumentTypeError(
                f"{text} must be {'above' if above else 'at least'} {least}{upper}"
            )
        return value

    return read


POSITIVE = number(int, 1)
SIZE = number(int, 1, LARGEST_SIZE)
SEED = number(int, 0, 2**63 - 1)
ABOVE_ZERO = number(float, 0, above=True)
NOT_NEGATIVE = number(float, 0)
SHARE = number(float, 0, 1)
SHARE_ABOVE_ZERO = number(float, 0, 1, above=True)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


def count(text: str) -> int:
    """A whole number of at least 1, such as 4096, 128k, 30M or 1.5B."""
    written = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbg]?)", text.lower())
    value = float(written[1]) * UNITS[written[2]] if written else 0
    if not 1 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number such as 4096, 128k or 1.5M"
        )
    return round(value)


def non_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the value must not be empty")
    return text


CONFIG_HELP = "a YAML or JSON file, or the name of a ready-made one such as tiny"
CONFIG, OPTIONAL_CONFIG = (
    argument("config", "CONFIG", CONFIG_HELP, nargs=nargs) for nargs in (None, "?")
)
OVERRIDES = argument(
    "overrides",
    "key=value",
    "a key of the configuration and its value",
    nargs="*",
    default=[],
)
RUN = argument("run", "RUN", "name or path of a run")
CHECKPOINT = option(
    "--checkpoint NAME", "latest, best, or the name of a checkpoint", default="latest"
)
DEPLOYED = argument(
    "configs", "CONFIG", "YAML or JSON file; one deployment per file", nargs="*"
)
GPUS = option("--gpus N", "GPU limit for all runs together", type=POSITIVE)
ATTENTIONS = ["softmax", "infini"]
DTYPES = ["float32", "bfloat16", "float16"]

# How shells complete what is given under a name, in the words of shtab.
COMPLETED_AS = {
    **dict.fromkeys(("CONFIG", "FILE", "PATH"), "file"),
    **dict.fromkeys(("DATASET", "DIR", "MODEL", "RUN"), "directory"),
}

COMMANDS = {
    "init": command(
        "write a commented configuration for your text and this machine",
        "init.init",
        argument(
            "output",
            "FILE",
            "file to write (default: my.yaml)",
            nargs="?",
            default="my.yaml",
        ),
        option(
            "--files PATH",
            "your text: file, folder or glob",
            repeated=True,
            required=True,
            type=non_empty,
        ),
        option("--text-column NAME", "field or column with the text (default: text)"),
        option(
            "--from MODEL",
            "continue the training of a Llama: a name on the Hugging Face Hub, or a folder",
        ),
        option(
            "--attention",
            "infini: Infini-attention (default: softmax, or as in MODEL)",
            choices=ATTENTIONS,
        ),
        option(
            "--tokens N",
            "tokens to train on, such as 300M (default: by the text)",
            type=count,
        ),
        option(
            "--parameters N",
            "size of the model, such as 30M (default: by the text)",
            type=count,
        ),
        option(
            "--hours H",
            "training time, at an assumed speed of this machine (default: 24)",
            type=ABOVE_ZERO,
        ),
    ),
    "run": command(
        "run the whole pipeline; run it again to resume",
        "stages.run",
        CONFIG,
        OVERRIDES,
        option("--no-prefect --direct", "run the same stages without Prefect"),
        option(
            "--dry-run",
            "only print the resolved configuration, the plan, the parameters and what is already "
            "built",
        ),
        is_resumed=True,
    ),
    "preprocess": command(
        "build the dataset of a configuration",
        "stages.preprocess",
        CONFIG,
        OVERRIDES,
        option("--repair", "verify all checksums and rebuild what is damaged"),
        is_resumed=True,
    ),
    "verify": command(
        "verify a dataset",
        "stages.verify",
        argument(
            "dataset", "DATASET", "name or path of a dataset, or its configuration"
        ),
        option("--deep", "verify every checksum, token and sequence"),
        option("--html FILE", "also write the checks and statistics as an HTML page"),
    ),
    "train": command(
        "train on a dataset that is already built",
        "stages.train",
        CONFIG,
        OVERRIDES,
        option(
            "--dataset DATASET",
            "name or path of the dataset (default: that of the configuration)",
        ),
        is_resumed=True,
    ),
    "join": command(
        "join a multi-node run with this machine",
        "stages.join",
        argument(
            "run",
            "RUN",
            "name of the run, or path of its folder (which can still be missing)",
        ),
        is_resumed=True,
    ),
    "runs": command("list all runs with state, step, losses and size", "runs.runs"),
    "report": command(
        "describe a run or dataset; write the page of a run (also during training)",
        "runs.report",
        argument("path", "PATH", "name or path of a run or a dataset"),
        option(
            "--html FILE",
            "write the page here (default of a run: report.html in its folder)",
        ),
        option("--open", "open the page in a browser"),
    ),
    "compare": command(
        "compare runs: settings, results and curves",
        "runs.compare",
        argument("runs", "RUN", "names or paths of runs", nargs="+"),
        option("--html FILE", "also write an HTML page with the curves of all runs"),
    ),
    "generate": command(
        "generate text from prompts",
        "models.generate",
        RUN,
        CHECKPOINT,
        option("--prompt TEXT", "text to continue", repeated=True),
        option("--prompt-file FILE", "file with text to continue", repeated=True),
        option(
            "--max-new-tokens N",
            "maximum number of generated tokens",
            type=POSITIVE,
            default=128,
        ),
        option(
            "--temperature T",
            "0: always the most likely token",
            type=NOT_NEGATIVE,
            default=0.8,
        ),
        option("--top-k K", "sample from the K most likely tokens", type=POSITIVE),
        option(
            "--top-p P",
            "sample from the most likely tokens with this total probability",
            type=SHARE_ABOVE_ZERO,
        ),
        option(
            "--min-p P",
            "sample from tokens at least P times as likely as the likeliest",
            type=SHARE_ABOVE_ZERO,
        ),
        option(
            "--repetition-penalty R",
            "above 1: fewer repetitions",
            type=ABOVE_ZERO,
            default=1.0,
        ),
        option(
            "--stop TEXT", "end the text at this string", repeated=True, type=non_empty
        ),
        option("--no-memory", "turn off Infini-attention's memory"),
        option("--seed S", "seed of the sampling", type=SEED, default=0),
    ),
    "evaluate": command(
        "measure perplexity or passkey retrieval",
        "models.evaluate",
        RUN,
        CHECKPOINT,
        option(
            "--files PATH",
            "text to evaluate on, as in data.files; with --passkey: the text before the numbers, "
            "read once for all of a length (model.memory_update=linear)",
            repeated=True,
            type=non_empty,
        ),
        option("--source NAME", "read the files as this source of the run"),
        option(
            "--split",
            "of the dataset, without --files (default: validation)",
            choices=["validation", "train"],
        ),
        option(
            "--sequences N",
            "only N sequences, drawn from the whole split",
            type=POSITIVE,
        ),
        option(
            "--stream", "read each file as one text with constant memory (not softmax)"
        ),
        option(
            "--passkey",
            "instead of perplexity: retrieval of hidden numbers by length and depth",
        ),
        option(
            "--lengths --context N",
            "with --passkey: lengths in tokens, such as 4096 or 1M "
            "(default: 1, 2, 4 and 8 sequence lengths)",
            type=count,
            nargs="+",
        ),
        option(
            "--depths D",
            "with --passkey: positions of the number; 0: beginning, 1: end "
            "(default: 0 0.25 0.5 0.75 1)",
            type=SHARE,
            nargs="+",
        ),
        option(
            "--segments N",
            "with --passkey, instead: segment boundaries between every token of the number and its "
            "answer",
            type=number(int, 0),
            nargs="+",
        ),
        option(
            "--form",
            "with --segments or --files: what is hidden, as data.passkey.form (default: passkey)",
            choices=[
                "passkey",
                "facts",
                "overwritten",
                "variables",
                "sentences",
                "niah_single",
            ],
        ),
        option(
            "--filler",
            "with --segments: the text around it; text: the run's own held-out text "
            "(default: repeated)",
            choices=["repeated", "random", "text"],
        ),
        option(
            "--samples N",
            "with --passkey: numbers per length and depth (default: 10)",
            type=POSITIVE,
        ),
        option(
            "--seed S", "with --passkey: seed of the numbers (default: 0)", type=SEED
        ),
    ),
    "heads": command(
        "measure which attention heads of a Llama retrieve, and could learn to read a memory",
        "models.heads",
        argument(
            "model", "MODEL", "name on the Hugging Face Hub, or folder with safetensors"
        ),
        option("--revision REV", "branch, tag or commit on the Hub (default: main)"),
        option("--picture FILE", "also draw the scores of all heads (.png or .svg)"),
        option("--seed S", "seed of the texts", type=SEED, default=0),
    ),
    "export": command(
        "export a trained model to a Hugging Face folder",
        "models.export",
        RUN,
        CHECKPOINT,
        option("--output DIR", "folder to write; it must not exist yet", required=True),
        option("--dtype", "type of the weights", choices=DTYPES, default="float32"),
        option(
            "--max-shard-size SIZE", "maximum size of a weights file", default="5GB"
        ),
    ),
    "import": command(
        "write a configuration that starts from a Hugging Face Llama",
        "models.import_folder",
        argument(
            "model", "MODEL", "name on the Hugging Face Hub, or folder with safetensors"
        ),
        option("--revision REV", "branch, tag or commit on the Hub (default: main)"),
        option("--output FILE", "file to write (default: <name of MODEL>.yaml)"),
        option(
            "--attention",
            "infini: Infini-attention (default: as in the folder)",
            choices=ATTENTIONS,
        ),
        option("--segment-length N", "tokens per segment (infini)", type=SIZE),
        option(
            "--attend-previous-segment", "segments also see the one before (infini)"
        ),
    ),
    "serve": command(
        "start a Prefect server with UI, deployments and a worker",
        "serve.serve",
        DEPLOYED,
        GPUS,
        option("--host HOST", "address of the server and UI", default="127.0.0.1"),
        option(
            "--allow-host NAME",
            "name under which others reach it, beside --host and localhost",
            repeated=True,
        ),
        option("--port PORT", "port of the server and UI", type=POSITIVE, default=4200),
        option(
            "--limit N",
            "maximum number of concurrent runs of a work pool",
            type=POSITIVE,
            default=1,
        ),
    ),
    "deploy": command(
        "create or update deployments on the server PREFECT_API_URL",
        "serve.deploy",
        DEPLOYED,
        GPUS,
    ),
    "doctor": command(
        "check this machine and print a fix for each problem",
        "stages.doctor",
        OPTIONAL_CONFIG,
        OVERRIDES,
        option(
            "--against RUN",
            "print what changed since RUN, and whether it would resume bitwise exactly",
        ),
        option("--strict", "exit with 1 if there is a warning"),
    ),
    "estimate": command(
        "estimate parameters, FLOPs and memory of a run",
        "stages.estimate",
        CONFIG,
        OVERRIDES,
    ),
    "gc": command(
        "list old and unused files; --yes deletes them",
        "runs.gc",
        option("--yes", "delete the files instead of listing them"),
        option(
            "--older-than DAYS",
            "keep files younger than this",
            type=NOT_NEGATIVE,
            default=1.0,
        ),
        option(
            "--keep-checkpoints N",
            "also include all but the N newest checkpoints of each run (at least 2, as the newest "
            "may be damaged); the best and permanent ones are kept",
            type=number(int, 2),
        ),
        option(
            "--unused-datasets",
            "also include datasets that no run in this home folder was trained on",
        ),
    ),
    "completion": command(
        "print a shell completion script",
        "commands.completion",
        argument(
            "shell", "SHELL", "bash, zsh or fish", choices=["bash", "zsh", "fish"]
        ),
    ),
    "help": command(
        "print this help, or the help of a command",
        "commands.help_text",
        argument("topic", "COMMAND", "command to describe", nargs="?"),
    ),
}
EVERY_COMMAND = [
    option(
        "--json", "print one JSON object on stdout; all other output goes to stderr"
    ),
    option("--quiet", "print only warnings and the result"),
    option("--verbose", "print more log lines, and tracebacks of errors"),
]
# Commands by heading, each group with an example.
GROUPS = {
    "Pipeline": (
        "run tiny train.max_steps=500",
        ("init", "run", "preprocess", "verify", "train", "join"),
    ),
    "Results": (
        'generate tiny --prompt "import os"',
        (
            "runs",
            "report",
            "compare",
            "generate",
            "evaluate",
            "heads",
            "export",
            "import",
        ),
    ),
    "Prefect": ("serve tiny", ("serve", "deploy")),
    "Tools": ("doctor tiny", ("doctor", "estimate", "gc", "completion", "help")),
}
OTHER_CODES = {
    "1": "warnings (doctor --strict)",
    "130, 143": "stopped by Ctrl-C or a signal; it does not resume",
}
SETTING_KEYS = """Set any key of the configuration with section.key=value, for example
train.max_steps=500. Every command has --json (one JSON object on stdout),
--quiet and --verbose."""


def overview() -> str:
    """The top-level help: commands by group, each group with an example."""
    lines = [
        "usage: infini-llama COMMAND [CONFIG] [key=value …] [options]",
        "",
        "Raw text to a trained Llama or Infini-Llama.",
    ]
    for heading, (example, names) in GROUPS.items():
        lines += ["", heading]
        lines += [f"  {name:<11} {COMMANDS[name].help}" for name in names]
        lines += [f"  Example: infini-llama {example}"]
    lines += [
        "",
        SETTING_KEYS,
        "'infini-llama help COMMAND' prints the options of a command.",
        "",
        "Exit codes:",
    ]
    codes = {
        str(int(code)): ending.of_command or ending.cause
        for code, ending in ENDINGS.items()
    }
    codes |= OTHER_CODES
    in_order = sorted(codes.items(), key=lambda item: int(item[0].partition(",")[0]))
    lines += [f"{code:>10}  {meaning}" for code, meaning in in_order]
    return "\n".join(lines) + "\n"


class Parser(argparse.ArgumentParser):
    """A parser with exit code 64 for invalid arguments.

    Its help is `overview` in place of a flat list of commands.
    """

    of_commands: dict[str, Parser]

    def format_help(self) -> str:
        return super().format_help() if self._subparsers is None else overview()

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        self.is_json = "--json" in (sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        if self.is_json:
            record = {"error": message, "exit_code": ConfigError.exit_code}
            self._print_message(json.dumps(record) + "\n", sys.stdout)
        self.exit(ConfigError.exit_code, f"{self.prog}: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action.choices, dict) and value not in action.choices:
            raise argparse.ArgumentError(None, _unknown_command(value))
        super()._check_value(action, value)


class Version(argparse.Action):
    """Print the version of the installed package."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"infini-llama {version('infini-llama')}")
        parser.exit()


def build_parser() -> Parser:
    parser = Parser(prog="infini-llama")
    parser.add_argument("--version", action=Version, nargs=0, help="print the version")
    parsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    parser.of_commands = parsers.choices
    for name, command in COMMANDS.items():
        description = f"{command.help[0].upper()}{command.help[1:]}."
        subparser = parsers.add_parser(name, help=command.help, description=description)
        for names, settings in (*command.arguments, *EVERY_COMMAND):
            action = subparser.add_argument(*names, **settings)
            if (kind := COMPLETED_AS.get(settings.get("metavar", ""))) is not None:
                action.complete = kind  # pyright: ignore[reportAttributeAccessIssue]
    return parser


def _unknown_command(name: str) -> str:
    """Message for a command that does not exist, with the most similar one."""
    similar = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = (
        f"did you mean {similar[0]}?"
        if similar
        else "'infini-llama help' lists the commands."
    )
    return f"unknown command '{name}'; {hint}"


def call(arguments: argparse.Namespace) -> Answer:
    """Import the module of the parsed command, and call the command's function."""
    module, _, name = COMMANDS[arguments.command].function.partition(".")
    function = getattr(
        importlib.import_module(f"infini_llama.flows.cli.{module}"), name
    )
    return function(arguments)


def completion(arguments: argparse.Namespace) -> Answer:
    import shtab

    script = shtab.complete(build_parser(), arguments.shell)
    return {"shell": arguments.shell, "script": script}, script


def help_text(arguments: argparse.Namespace) -> Answer:
    if arguments.topic is None:
        text = overview()
    elif arguments.topic in COMMANDS:
        text = build_parser().of_commands[arguments.topic].format_help()
    else:
        raise ConfigError(_unknown_command(arguments.topic))
    return {"help": text}, text.rstrip()
