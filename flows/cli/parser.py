"""The commands and their options."""

from __future__ import annotations

from collections.abc import Callable

from infini_llama.flows.cli.arguments import (
    Parser,
    Version,
    above_zero,
    at_least_one,
    at_least_two,
    at_least_zero,
    not_negative,
    seed,
    share,
    share_or_zero,
    some_text,
    tokens,
)
from infini_llama.flows.cli.overview import GROUPS, PAGES, overview

Add = Callable[[str], Parser]  # a command by its name


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
    described = {name: (words, page) for _, _, page, group in GROUPS for name, words in group.items()}

    def add(name: str) -> Parser:
        words, page = described[name]
        about, more = f"{words[0].upper()}{words[1:]}.", f"Documentation: {PAGES.get(name, page)}"
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
    init.add_argument("--attention", choices=["softmax", "infini"], help="infini: Infini-attention (default: softmax)")
    run = add("run")
    _configured(run)
    run.add_argument("--direct", action="store_true", help="run the same stages without Prefect")
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
    join.add_argument("--node-rank", type=at_least_one, metavar="N", help="rank of this node (default: a free one)")


def _results(add: Add) -> None:
    add("runs")
    inspect = add("inspect")
    inspect.add_argument("path", metavar="PATH", help="name or path of a dataset or a run")
    inspect.add_argument("--html", metavar="FILE", help="also write an HTML page with distributions or curves")
    report = add("report")
    _run(report)
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
        default="validation",
        help="split of the run's dataset, if there is no --files",
    )
    evaluate.add_argument("--sequences", type=at_least_one, metavar="N", help="only the first N sequences of the split")
    evaluate.add_argument(
        "--stream", action="store_true", help="read each file as one text with constant memory (not softmax)"
    )
    passkey = add("passkey")
    _run(passkey)
    _checkpoint(passkey)
    passkey.add_argument("--lengths", "--context", type=tokens, nargs="+", metavar="N",
                         help="lengths of the texts in tokens, such as 4096 or 1M (default: 1, 2, 4 and 8 sequence "
                              "lengths)")  # fmt: skip
    passkey.add_argument("--depths", type=share_or_zero, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="D",
                         help="positions of the number; 0: beginning, 1: end (default: 0 0.25 0.5 0.75 1)")  # fmt: skip
    passkey.add_argument("--segments", type=at_least_zero, nargs="+", metavar="N",
                         help="instead: segment boundaries between every token of the number and its answer")  # fmt: skip
    passkey.add_argument("--form", choices=["passkey", "facts", "overwritten", "variables"], default="passkey",
                         help="with --segments: what is hidden, as data.passkey.form (default: passkey)")  # fmt: skip
    passkey.add_argument("--filler", choices=["repeated", "random", "text"], default="repeated",
                         help="with --segments: the text around it; text: the run's own held-out text")  # fmt: skip
    passkey.add_argument("--samples", type=at_least_one, default=10, metavar="N", help="numbers per length and depth")
    passkey.add_argument("--seed", type=seed, default=0, metavar="S", help="seed of the numbers")


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
    bring.add_argument("folder", metavar="HF_DIR", help="folder with config.json and safetensors")
    bring.add_argument("--output", metavar="FILE", help="file to write (default: <name of HF_DIR>.yaml)")
    bring.add_argument(
        "--attention", choices=["softmax", "infini"], help="infini: Infini-attention (default: as in the folder)"
    )
    bring.add_argument("--segment-length", type=at_least_one, metavar="N", help="tokens per segment (infini)")


def _tools(add: Add, parser: Parser) -> None:
    serve = add("serve")
    _deployed(serve, "+")
    serve.add_argument("--host", default="127.0.0.1", help="address of the server and UI")
    serve.add_argument("--port", type=at_least_one, default=4200, help="port of the server and UI")
    serve.add_argument("--limit", type=at_least_one, default=1, metavar="N", help="maximum number of concurrent runs")
    _deployed(add("deploy"), "*")
    doctor = add("doctor")
    _configured(doctor, "?")
    doctor.add_argument(
        "--against", metavar="RUN", help="print what changed since RUN, and whether it would resume bitwise exactly"
    )
    _configured(add("estimate"))
    config = add("config")
    config.add_argument("action", choices=["show"], help="show: print the configuration as YAML")
    _configured(config)
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
