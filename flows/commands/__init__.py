"""What each command does: a function of its arguments that returns a record and what people read."""

from flows.commands.keeping import completion, gc, init
from flows.commands.looking import compare, estimate, inspect, report, runs
from flows.commands.models import evaluate, export, generate, import_folder, passkey
from flows.commands.offering import deploy, serve, submit
from flows.commands.running import doctor, join, preprocess, run, train, verify

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
    "submit",
    "train",
    "verify",
]
