"""The commands and their options."""

from __future__ import annotations

import argparse
import math
import sys
from typing import NoReturn

from infini_llama.configs.errors import ConfigError

EPILOG = """exit codes: 0 done; 1 done, with warnings (doctor); 64 bad configuration or arguments; 65 bad data; 70 unexpected or
repeated failure; 75 stopped with a checkpoint (the same command resumes); 130 or 143 stopped without one"""


class Parser(argparse.ArgumentParser):
    """argparse, with the exit code that bad configuration has everywhere in this project."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ConfigError.exit_code, f"{self.prog}: {message}\n")


def build_parser() -> Parser:
    every = Parser(add_help=False)
    every.add_argument("--json", action="store_true", help="last line on stdout is one JSON object; all else on stderr")
    every.add_argument("--quiet", action="store_true", help="no progress, only warnings and the result")
    every.add_argument("--verbose", action="store_true", help="more lines, and tracebacks of errors")
    configured = Parser(add_help=False)
    configured.add_argument(
        "config", metavar="CONFIG", help="YAML or JSON file; configs/tiny.yaml and others come along"
    )
    configured.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="for example train.max_steps=500"
    )

    parser = Parser(prog="infini-llama", description="Raw text to a trained Llama or Infini-Llama.", epilog=EPILOG,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, words: str, *parents: Parser) -> Parser:
        return commands.add_parser(name, help=words, description=words, parents=[*parents, every])

    run = command("run", "the whole pipeline; the same command again carries on", configured)
    run.add_argument("--direct", action="store_true", help="the same stages without Prefect")
    preprocess = command("preprocess", "text to a dataset of tokens", configured)
    preprocess.add_argument(
        "--repair", action="store_true", help="check every byte and build again only what is damaged"
    )
    verify = command("verify", "check a dataset")
    verify.add_argument("dataset", metavar="DATASET", help="path of a dataset, or its name")
    verify.add_argument("--deep", action="store_true", help="every checksum, token and row, and decoded samples")
    verify.add_argument(
        "--html", metavar="FILE", help="also write what was found, and what the dataset holds, as a page"
    )
    doctor = command("doctor", "what this machine can do, and what a run would use")
    doctor.add_argument("config", metavar="CONFIG", nargs="?", help="check what this configuration asks for")
    doctor.add_argument("overrides", metavar="key=value", nargs="*", default=[])
    doctor.add_argument(
        "--against", metavar="RUN", help="what has changed since a run, and whether its resume stays exact"
    )
    train = command("train", "train on a dataset that preprocess has built", configured)
    train.add_argument("--dataset", metavar="D", help="path or name of the dataset; default: the configuration's own")
    join = command("join", "take part, as one more machine, in a run of several nodes that another one leads")
    join.add_argument("run", metavar="RUN", help="path of the run's folder, or its name; it need not be there yet")
    join.add_argument("--node-rank", type=_at_least_one, metavar="N", help="which node this is (default: a free one)")
    command("estimate", "parameters, arithmetic and memory of a run, before anything starts", configured)
    generate = command("generate", "let a trained model write")
    generate.add_argument("run", metavar="RUN", help="path of a run, or its name")
    generate.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="text to continue; may be repeated"
    )
    generate.add_argument(
        "--prompt-file", action="append", default=[], metavar="FILE", help="a file's text to continue"
    )
    generate.add_argument("--checkpoint", default="latest", help="latest, best or the name of one (default: latest)")
    generate.add_argument("--max-new-tokens", type=_at_least_one, default=128, metavar="N")
    generate.add_argument(
        "--temperature", type=_not_negative, default=0.8, metavar="T", help="0: always the likeliest token"
    )
    generate.add_argument("--top-k", type=_at_least_one, metavar="K", help="choose among the K likeliest tokens")
    generate.add_argument(
        "--top-p", type=_share, metavar="P", help="choose among the likeliest tokens of this total probability"
    )
    generate.add_argument(
        "--min-p", type=_share, metavar="P", help="choose among tokens at least P times as likely as the likeliest"
    )
    generate.add_argument(
        "--repetition-penalty", type=_above_zero, default=1.0, metavar="R", help="above 1: fewer repetitions"
    )
    generate.add_argument(
        "--stop", action="append", type=_some_text, default=[], metavar="TEXT", help="ends a text; may be repeated"
    )
    generate.add_argument("--no-memory", action="store_true", help="leave Infini-attention's memory out")
    generate.add_argument("--seed", type=int, default=0, metavar="S")
    export = command("export", "a trained model as a Hugging Face folder")
    export.add_argument("run", metavar="RUN", help="path of a run, or its name")
    export.add_argument("--output", required=True, metavar="DIR", help="folder to write; it must not exist yet")
    export.add_argument("--checkpoint", default="latest", help="latest, best or the name of one (default: latest)")
    export.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights (default: float32)",
    )
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: 5GB)")
    bring = command("import", "a configuration that starts from the weights of a Hugging Face Llama")
    bring.add_argument("folder", metavar="HF_DIR", help="folder with config.json and safetensors")
    bring.add_argument("--output", metavar="FILE", help="where to write it (default: <name of HF_DIR>.yaml)")
    bring.add_argument("--attention", choices=["softmax", "infini"], help="infini: with a memory (default: as it is)")
    bring.add_argument("--segment-length", type=_at_least_one, metavar="N", help="tokens of local attention (infini)")
    serve = command(
        "serve", "Prefect's server and UI, the configurations as deployments, and a worker; Ctrl-C ends all"
    )
    _configurations(serve, "+")
    serve.add_argument("--host", default="127.0.0.1", help="address of the server and UI (default: 127.0.0.1)")
    serve.add_argument("--port", type=_at_least_one, default=4200, help="port of the server and UI (default: 4200)")
    serve.add_argument("--limit", type=_at_least_one, default=1, metavar="N", help="runs at a time (default: 1)")
    _configurations(
        command("deploy", "work pool, limits, automation and deployments on the server of PREFECT_API_URL"), "*"
    )
    inspect = command("inspect", "what is in a dataset or a run")
    inspect.add_argument("path", metavar="PATH", help="path or name of a dataset or a run")
    inspect.add_argument("--html", metavar="FILE", help="also write it as a page, with distributions or curves")
    report = command("report", "a run's page, report.html, as it is now; also while the run goes on")
    report.add_argument("run", metavar="RUN", help="path of a run, or its name")
    compare = command("compare", "runs beside one another: what differs in them, and what came of it")
    compare.add_argument("runs", metavar="RUN", nargs="+", help="paths of runs, or their names")
    compare.add_argument("--html", metavar="FILE", help="also write a page with their curves over each other")
    evaluate = command("evaluate", "how well a model predicts text; with its memory and without")
    evaluate.add_argument("run", metavar="RUN", help="path of a run, or its name")
    evaluate.add_argument(
        "--files", action="append", default=[], metavar="PATH", help="text to read, as data.files; may be repeated"
    )
    evaluate.add_argument(
        "--split", choices=["validation", "train"], default="validation", help="of the run's dataset, without --files"
    )
    evaluate.add_argument("--sequences", type=_at_least_one, metavar="N", help="only the first N rows of that")
    evaluate.add_argument(
        "--stream", action="store_true", help="each of the --files as one text, in constant state (not softmax)"
    )
    evaluate.add_argument("--checkpoint", default="latest", help="latest, best or the name of one (default: latest)")
    passkey = command("passkey", "does a model find a number that it read long before, by length and depth")
    passkey.add_argument("run", metavar="RUN", help="path of a run, or its name")
    passkey.add_argument(
        "--lengths", type=_at_least_one, nargs="+", metavar="N", help="tokens of the texts (default: 1 to 8 rows)"
    )
    passkey.add_argument(
        "--depths",
        type=_share_or_none,
        nargs="+",
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        metavar="D",
        help="where the number stands, 0: at the beginning, 1: at the end (default: 0 0.25 0.5 0.75 1)",
    )
    passkey.add_argument("--samples", type=_at_least_one, default=10, metavar="N", help="numbers each (default: 10)")
    passkey.add_argument("--seed", type=int, default=0, metavar="S")
    passkey.add_argument("--checkpoint", default="latest", help="latest, best or the name of one (default: latest)")
    init = command("init", "a commented configuration for your own text and this machine; asks what no flag says")
    init.add_argument("output", metavar="FILE", nargs="?", default="my.yaml", help="to write (default: my.yaml)")
    init.add_argument("--files", action="append", default=[], metavar="PATH", help="your text; may be repeated")
    init.add_argument("--attention", choices=["softmax", "infini"], help="infini: with a memory (default: softmax)")
    completion = command("completion", "a script that completes commands and options in your shell")
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    completion.set_defaults(parser=parser)
    command("runs", "every run there is: state, step, losses, age, size")
    gc = command("gc", "what is temporary, abandoned or old; --yes removes it, and never what a run resumes from")
    gc.add_argument("--yes", action="store_true", help="remove it; without this it is only listed")
    gc.add_argument(
        "--older-than", type=_not_negative, default=1.0, metavar="DAYS", help="nothing younger goes (default: 1)"
    )
    gc.add_argument(
        "--keep-checkpoints",
        type=_at_least_two,
        metavar="N",
        help="of each run the N newest stay, beside the best and the permanent ones, and older ones go",
    )
    gc.add_argument("--unused-datasets", action="store_true", help="datasets that no run here was trained on go, too")
    return parser


def _configurations(parser: Parser, number: str) -> None:
    parser.add_argument("configs", metavar="CONFIG", nargs=number, help="YAML or JSON file; a deployment for each")
    parser.add_argument("--gpus", type=_at_least_one, metavar="N", help="GPUs that all runs may hold at a time")


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _at_least_two(text: str) -> int:
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text} must be at least 2, so that a damaged one has a predecessor")
    return number


def _not_negative(text: str) -> float:
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must not be negative, infinite or nan")
    return number


def _above_zero(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and finite")
    return number


def _share(text: str) -> float:
    if not 0 < (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return number


def _share_or_none(text: str) -> float:
    if not 0 <= (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 1")
    return number


def _some_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it must have at least one letter; an empty one would end every text at once")
    return text
