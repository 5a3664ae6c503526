"""One function per command: arguments in, a record for --json and text out."""

from argparse import Namespace
from collections.abc import Callable

from infini_llama.flows.cli.models import evaluate, export, generate, import_folder, passkey
from infini_llama.flows.cli.paths import Answer
from infini_llama.flows.cli.pipeline import doctor, join, preprocess, run, train, verify
from infini_llama.flows.cli.results import compare, estimate, inspect, report, runs
from infini_llama.flows.cli.serve import deploy, serve
from infini_llama.flows.cli.tools import completion, config, gc, help_text, init

COMMANDS: dict[str, Callable[[Namespace], Answer]] = {
    "compare": compare,
    "completion": completion,
    "config": config,
    "deploy": deploy,
    "doctor": doctor,
    "estimate": estimate,
    "evaluate": evaluate,
    "export": export,
    "gc": gc,
    "generate": generate,
    "help": help_text,
    "import": import_folder,
    "init": init,
    "inspect": inspect,
    "join": join,
    "passkey": passkey,
    "preprocess": preprocess,
    "report": report,
    "run": run,
    "runs": runs,
    "serve": serve,
    "train": train,
    "verify": verify,
}
