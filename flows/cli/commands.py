"""One function per command: arguments in, a record for --json and text out."""

from infini_llama.flows.cli.models import evaluate, export, generate, import_folder, passkey
from infini_llama.flows.cli.pipeline import doctor, join, preprocess, run, train, verify
from infini_llama.flows.cli.results import compare, estimate, inspect, report, runs
from infini_llama.flows.cli.runs import completion, gc, init
from infini_llama.flows.cli.serve import deploy, serve

__all__ = [
    "compare",
    "completion",
    "deploy",
    "doctor",
    "estimate",
    "evaluate",
    "export",
    "gc",
    "generate",
    "import_folder",
    "init",
    "inspect",
    "join",
    "passkey",
    "preprocess",
    "report",
    "run",
    "runs",
    "serve",
    "train",
    "verify",
]
