"""The commands and their options."""

from __future__ import annotations

from infini_llama.flows.cli.arguments import (
    Parser,
    Version,
    above_zero,
    at_least_one,
    at_least_two,
    not_negative,
    share,
    share_or_zero,
    some_text,
)

# Heading, an example, the page of the documentation, and the commands with a description.
GROUPS = (
    (
        "Pipeline",
        "infini-llama run configs/tiny.yaml train.max_steps=500",
        "docs/quickstart.md",
        {
            "init": "write a commented configuration for your text and this machine",
            "run": "run the whole pipeline; the same command resumes",
            "preprocess": "build the dataset of a configuration",
            "verify": "check a dataset",
            "train": "train on a dataset that is already built",
            "join": "take part in a multi-node run as one more machine",
        },
    ),
    (
        "Results",
        'infini-llama generate tiny --prompt "import os"',
        "docs/evaluation.md",
        {
            "runs": "list all runs: state, step, losses, age, size",
            "inspect": "describe a dataset or a run",
            "report": "write report.html of a run, also while it trains",
            "compare": "compare runs: differences, results and curves",
            "generate": "continue prompts with a trained model",
            "evaluate": "measure perplexity, with and without memory",
            "passkey": "measure retrieval of a number by length and depth",
            "export": "write a Hugging Face folder of a trained model",
            "import": "write a configuration that starts from a Hugging Face Llama",
        },
    ),
    (
        "Prefect",
        "infini-llama serve configs/tiny.yaml",
        "docs/prefect.md",
        {
            "serve": "start Prefect's server, UI, deployments and a worker; Ctrl-C ends all",
            "deploy": "create work pool, limits, automation and deployments on the server of PREFECT_API_URL",
        },
    ),
    (
        "Tools",
        "infini-llama doctor configs/tiny.yaml",
        "docs/environment.md",
        {
            "doctor": "check this machine and print a fix for each problem",
            "estimate": "print parameters, FLOPs and memory of a run before it starts",
            "config": "print a configuration with all defaults",
            "gc": "list unreferenced and old files; --yes deletes them",
            "completion": "print a shell completion script",
            "help": "print this help, or that of a command",
        },
    ),
)
EXIT_CODES = """Exit codes: 0 done; 1 done, with warnings (doctor); 64 invalid configuration or arguments; 65 invalid data;
70 unexpected or repeated failure; 75 stopped with a checkpoint (the same command resumes); 130 or 143 stopped without one"""
EVERY = """Any key of the configuration can be set as section.key=value, for example train.max_steps=500.
Every command has --json (one JSON object on stdout), --quiet and --verbose."""


def overview() -> str:
    """The top-level help: commands by group, each group with an example and its page."""
    lines = [
        "usage: infini-llama COMMAND [CONFIG] [key=value …] [options]",
        "",
        "Raw text to a trained Llama or Infini-Llama.",
    ]
    for heading, example, page, commands in GROUPS:
        lines += ["", f"{heading} ({page})", *(f"  {name:<11} {words}" for name, words in commands.items())]
        lines += [f"  for example: {example}"]
    lines += [
        "",
        EVERY,
        "'infini-llama help COMMAND' describes a command; --version prints the version.",
        "",
        EXIT_CODES,
    ]
    return "\n".join(lines) + "\n"


def build_parser() -> Parser:
    """The parser of the whole command line."""
    every = Parser(add_help=False)
    every.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line on stdout; all else on stderr"
    )
    every.add_argument("--quiet", action="store_true", help="print only warnings and the result")
    every.add_argument("--verbose", action="store_true", help="print more lines, and tracebacks of errors")

    parser = Parser(prog="infini-llama", overview=overview())
    parser.add_argument("--version", action=Version, help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    added = {
        name: commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.", parents=[every],
                                  epilog=f"Documentation: {page}")
        for _, _, page, group in GROUPS for name, words in group.items()
    }  # fmt: skip
    _pipeline(added)
    _results(added)
    _models(added)
    _tools(added, parser)
    return parser


def _configured(parser: Parser, nargs: str | None = None) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", nargs=nargs, help="YAML or JSON file, or a ready-made one such as tiny"
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="for example train.max_steps=500")


def _run(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of a run, or its path")


def _checkpoint(parser: Parser) -> None:
    parser.add_argument("--checkpoint", default="latest", help="latest, best, or the name of a checkpoint")


def _deployed(parser: Parser, nargs: str) -> None:
    parser.add_argument("configs", metavar="CONFIG", nargs=nargs, help="YAML or JSON file; one deployment per file")
    parser.add_argument("--gpus", type=at_least_one, metavar="N", help="limit of GPUs for all runs together")


def _pipeline(added: dict[str, Parser]) -> None:
    init = added["init"]
    init.add_argument("output", metavar="FILE", nargs="?", default="my.yaml", help="file to write (default: my.yaml)")
    init.add_argument("--files", action="append", default=[], metavar="PATH", help="your text; may be repeated")
    init.add_argument("--attention", choices=["softmax", "infini"], help="infini: with a memory (default: softmax)")
    run = added["run"]
    _configured(run)
    run.add_argument("--direct", action="store_true", help="run the same stages without Prefect")
    run.add_argument("--dry-run", action="store_true",
                     help="only print the resolved configuration, the plan, the parameters and what is cached")  # fmt: skip
    preprocess = added["preprocess"]
    _configured(preprocess)
    preprocess.add_argument("--repair", action="store_true", help="check every byte and rebuild only what is damaged")
    verify = added["verify"]
    verify.add_argument("dataset", metavar="DATASET", help="name of a dataset, or its path")
    verify.add_argument(
        "--deep", action="store_true", help="check every checksum, token and sequence, and print samples"
    )
    verify.add_argument("--html", metavar="FILE", help="also write the checks and statistics as a page")
    train = added["train"]
    _configured(train)
    train.add_argument(
        "--dataset", metavar="D", help="name or path of the dataset (default: that of the configuration)"
    )
    join = added["join"]
    join.add_argument("run", metavar="RUN", help="name of the run, or the path of its folder, which need not exist yet")
    join.add_argument("--node-rank", type=at_least_one, metavar="N", help="rank of this node (default: a free one)")


def _results(added: dict[str, Parser]) -> None:
    added["inspect"].add_argument("path", metavar="PATH", help="name or path of a dataset or a run")
    added["inspect"].add_argument("--html", metavar="FILE", help="also write a page, with distributions or curves")
    _run(added["report"])
    added["report"].add_argument("--open", action="store_true", help="open the page in a browser")
    added["compare"].add_argument("runs", metavar="RUN", nargs="+", help="names or paths of runs")
    added["compare"].add_argument("--html", metavar="FILE", help="also write a page with the curves of all runs")
    evaluate = added["evaluate"]
    _run(evaluate)
    _checkpoint(evaluate)
    evaluate.add_argument(
        "--files", action="append", default=[], metavar="PATH", help="text to read, as data.files; may be repeated"
    )
    evaluate.add_argument(
        "--split",
        choices=["validation", "train"],
        default="validation",
        help="split of the run's dataset, without --files",
    )
    evaluate.add_argument("--sequences", type=at_least_one, metavar="N", help="only the first N sequences of the split")
    evaluate.add_argument(
        "--stream", action="store_true", help="read each file as one text, in constant state (not softmax)"
    )
    passkey = added["passkey"]
    _run(passkey)
    _checkpoint(passkey)
    passkey.add_argument("--lengths", type=at_least_one, nargs="+", metavar="N",
                         help="lengths of the texts in tokens (default: 1, 2, 4 and 8 sequence lengths)")  # fmt: skip
    passkey.add_argument("--depths", type=share_or_zero, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="D",
                         help="position of the number, 0: at the beginning, 1: at the end (default: 0 0.25 0.5 0.75 1)")  # fmt: skip
    passkey.add_argument("--samples", type=at_least_one, default=10, metavar="N", help="numbers per length and depth")
    passkey.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the numbers")


def _models(added: dict[str, Parser]) -> None:
    generate = added["generate"]
    _run(generate)
    _checkpoint(generate)
    generate.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="text to continue; may be repeated"
    )
    generate.add_argument(
        "--prompt-file", action="append", default=[], metavar="FILE", help="file with text to continue; may be repeated"
    )
    generate.add_argument(
        "--max-new-tokens", type=at_least_one, default=128, metavar="N", help="maximum length of a text"
    )
    generate.add_argument(
        "--temperature", type=not_negative, default=0.8, metavar="T", help="0: always the most likely token"
    )
    generate.add_argument("--top-k", type=at_least_one, metavar="K", help="sample from the K most likely tokens")
    generate.add_argument(
        "--top-p", type=share, metavar="P", help="sample from the most likely tokens of this total probability"
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
        help="end a text at this string; may be repeated",
    )
    generate.add_argument("--no-memory", action="store_true", help="leave out Infini-attention's memory")
    generate.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the sampling")
    export = added["export"]
    _run(export)
    _checkpoint(export)
    export.add_argument("--output", required=True, metavar="DIR", help="folder to write; it must not exist yet")
    export.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="type of the weights"
    )
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="maximum size of a file")
    bring = added["import"]
    bring.add_argument("folder", metavar="HF_DIR", help="folder with config.json and safetensors")
    bring.add_argument("--output", metavar="FILE", help="file to write (default: <name of HF_DIR>.yaml)")
    bring.add_argument(
        "--attention", choices=["softmax", "infini"], help="infini: with a memory (default: as in the folder)"
    )
    bring.add_argument("--segment-length", type=at_least_one, metavar="N", help="tokens per segment (infini)")


def _tools(added: dict[str, Parser], parser: Parser) -> None:
    _deployed(added["serve"], "+")
    added["serve"].add_argument("--host", default="127.0.0.1", help="address of the server and UI")
    added["serve"].add_argument("--port", type=at_least_one, default=4200, help="port of the server and UI")
    added["serve"].add_argument(
        "--limit", type=at_least_one, default=1, metavar="N", help="maximum runs at the same time"
    )
    _deployed(added["deploy"], "*")
    _configured(added["doctor"], "?")
    added["doctor"].add_argument(
        "--against", metavar="RUN", help="what changed since a run, and whether its resume stays bitwise exact"
    )
    _configured(added["estimate"])
    added["config"].add_argument("action", choices=["show"], help="show: print the configuration as YAML")
    _configured(added["config"])
    gc = added["gc"]
    gc.add_argument("--yes", action="store_true", help="delete; without this, the files are only listed")
    gc.add_argument("--older-than", type=not_negative, default=1.0, metavar="DAYS", help="keep everything younger")
    gc.add_argument("--keep-checkpoints", type=at_least_two, metavar="N",
                    help="also delete checkpoints older than the N newest of each run, except the best and permanent ones")  # fmt: skip
    gc.add_argument(
        "--unused-datasets", action="store_true", help="also delete datasets that no run here was trained on"
    )
    added["completion"].add_argument("shell", choices=["bash", "zsh", "fish"], help="your shell")
    added["completion"].set_defaults(parser=parser)
    added["help"].add_argument("topic", metavar="COMMAND", nargs="?", help="a command")
    added["help"].set_defaults(parser=parser)
