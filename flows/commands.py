"""What each command does: takes the parsed arguments, returns a JSON record and the text for people."""

import logging
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import ConfigError, DataError, PipelineError

if TYPE_CHECKING:
    from configs.schema import PipelineConfig
    from tasks.train.node import Wishes

Answer = tuple[dict, str]
log = logging.getLogger("infini_llama.export")


def run(arguments: Namespace) -> Answer:
    from configs.loading import load_config
    from flows.console import summary_text

    config = load_config(arguments.config, arguments.overrides)
    if joined := _joins(config):
        return joined
    if arguments.direct:
        from flows.direct import pretrain_directly

        summary = pretrain_directly(config)
    else:
        from flows.server import prefect_api

        home = config.runtime.home.resolve()
        _prefect_speaks_into(home, arguments)
        with prefect_api(home):
            from httpx import TransportError

            from flows.pretrain import pretrain

            try:
                summary = pretrain(config)
            except TransportError as fault:  # training neither needs the server nor stops with it
                raise PipelineError(
                    f"Prefect's server does not answer any more ({fault}); what was reached stands in "
                    f"{home / 'runs' / config.runtime.name}, and the same command reports it or carries on."
                ) from fault
    return summary, summary_text(summary)


def serve(arguments: Namespace) -> Answer:
    from flows.server import lasting_api

    home = _home()
    _prefect_speaks_into(home, arguments)
    with lasting_api(home, arguments.host, arguments.port) as own:
        from flows.serving import serve

        api = os.environ["PREFECT_API_URL"] if own else "that of PREFECT_API_URL"
        logging.getLogger("infini_llama.serve").info("UI: %s", api.removesuffix("/api"))
        serve(arguments.configs, home, arguments.limit, arguments.gpus)
    return {}, ""


def deploy(arguments: Namespace) -> Answer:
    from flows.inspection import as_text
    from flows.server import given_api

    with given_api(_home()):
        _prefect_speaks_into(_home(), arguments)
        from flows.deployments import deploy

        record = deploy(arguments.configs, arguments.gpus)
    return record, as_text(record)


def submit(arguments: Namespace) -> Answer:
    from configs.loading import load_config
    from flows.inspection import as_text
    from flows.server import given_api

    config = load_config(arguments.config, arguments.overrides)
    name = arguments.deployment or config.deployment.name or Path(arguments.config).stem
    with given_api(_home()):
        _prefect_speaks_into(_home(), arguments)
        from flows.submission import submit, watch

        record = submit(config, name, arguments.config)
        if arguments.watch:
            logging.getLogger("infini_llama.submit").info(
                "run %s is submitted: %s", record["name"], record["url"] or record["id"]
            )
            record |= watch(record["id"])
    return record, as_text(record)


def preprocess(arguments: Namespace) -> Answer:
    from configs.loading import load_config
    from flows.direct import resolved
    from flows.inspection import as_text
    from tasks.preprocess import stage

    settings = resolved(load_config(arguments.config, arguments.overrides))
    home = settings["runtime"]["home"]
    reference = stage.preprocess(settings["data"], home, repair=arguments.repair, write_rows=arguments.materialize)
    return reference, as_text({"dataset": str(Path(home, reference["path"]))} | reference)


def verify(arguments: Namespace) -> Answer:
    from flows.datasets import references
    from flows.inspection import as_text
    from tasks.verify_data.checks import verify

    path = _find(arguments.dataset, "datasets")
    level, home = "deep" if arguments.deep else "quick", str(_home())
    reports = {
        reference["chunks"]: verify(reference, home, level, sys.maxsize) for reference in references(path, _home())
    }
    record = {
        "dataset": str(path),
        "level": level,
        "ok": all(report["ok"] for report in reports.values()),
        "checked_bytes": sum(report["checked_bytes"] for report in reports.values()),
        "seconds": sum(report["seconds"] for report in reports.values()),
        "checks": [{"chunks": name} | check for name, report in reports.items() for check in report["checks"]],
    }
    statistics = next((report["statistics"] for report in reports.values() if "statistics" in report), None)
    shown = record
    if statistics:
        record |= {"statistics": statistics}
        beside = {name: {split: statistics[split][name] for split in statistics} for name in statistics["train"]}
        shown = record | {"statistics": beside}
    text = as_text(shown)
    if arguments.html is not None:
        from tasks.report.dataset import dataset_page

        record |= {"page": _write_page(arguments.html, dataset_page(path, record))}
        text += f"\n\n{record['page']}"
    return record, text


def doctor(arguments: Namespace) -> Answer:
    from flows.inspection import as_text
    from tasks.patch_environment.doctor import doctor

    config, home = None, str(_home())
    if arguments.config is not None:
        from configs.loading import load_config
        from flows.direct import resolved

        config = resolved(load_config(arguments.config, arguments.overrides))
        home = config["runtime"]["home"]
    against = None if arguments.against is None else _find(arguments.against, "runs")
    report = doctor(config, home, against)
    shown = {"findings": report["findings"], "plan": report["plan"]}
    shown["patches"] = [patch for patch in report["patches"] if patch["applies"]]
    if since := report["against"]:
        shown |= {"against": since["run"], "resume": since["resume"], "differences": since["differences"]}
    return report, as_text({part: value for part, value in shown.items() if value})


def train(arguments: Namespace) -> Answer:
    from configs.loading import load_config
    from flows.console import summary_text
    from flows.datasets import reference_for
    from flows.direct import resolved, verify_and_train
    from tasks.preprocess.stage import lookup

    config = load_config(arguments.config, arguments.overrides)
    if joined := _joins(config):
        return joined
    settings = resolved(config)
    if arguments.dataset is not None:
        reference = reference_for(
            settings["data"], _find(arguments.dataset, "datasets"), Path(settings["runtime"]["home"])
        )
    else:
        reference = lookup(settings["data"], settings["runtime"]["home"])
    if reference is None:
        raise DataError(
            f"the dataset of {arguments.config} is not built yet; run 'infini-llama preprocess {arguments.config}', "
            "or name one with --dataset."
        )
    summary = verify_and_train(settings, reference)
    return summary, summary_text(summary)


def join(arguments: Namespace) -> Answer:
    from tasks.train.node import Wishes

    path = Path(arguments.run)
    return _join(
        path.resolve() if path.exists() or len(path.parts) > 1 else _home() / "runs" / path,
        Wishes.of_variables(arguments.node_rank),
    )


def _join(run: Path, wishes: "Wishes") -> Answer:
    from tasks.train.node import serve

    record = {"run": str(run), "exit_code": serve(run, wishes)}
    return record, f"joined      {run}: it has ended" + (f" with {record['exit_code']}" if record["exit_code"] else "")


def _joins(config: "PipelineConfig") -> Answer | None:
    """What a command that is to lead a run does where its configuration says that this machine is another node than the first."""
    environment = config.environment
    if environment.node_rank in ("auto", 0):
        return None
    from flows.direct import resolved
    from tasks.train.node import Wishes

    runtime = resolved(config)["runtime"]
    address = None if environment.master_addr == "auto" else environment.master_addr
    port = None if environment.port == "auto" else environment.port
    wishes = Wishes(environment.nnodes, environment.node_rank, address, port)
    return _join(Path(runtime["home"], "runs", runtime["name"]), wishes)


def estimate(arguments: Namespace) -> Answer:
    from configs.loading import load_config
    from flows.direct import resolved
    from flows.inspection import estimate_text
    from tasks.estimate.run import estimate

    record = estimate(resolved(load_config(arguments.config, arguments.overrides)))
    return record, estimate_text(record)


def generate(arguments: Namespace) -> Answer:
    run = _find(arguments.run, "runs")  # before the imports, which take seconds
    prompts = [*arguments.prompt, *(_text_of(file) for file in arguments.prompt_file)]
    if not prompts:
        raise ConfigError(
            "generate has nothing to continue; give --prompt TEXT or --prompt-file FILE, as often as needed."
        )
    from model.sampling import Sampling
    from tasks.train.load import end_of_text_of, load_model
    from tasks.train.writing import Writer

    model, tokenizer = load_model(run, arguments.checkpoint)
    model.use_memory(not arguments.no_memory)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    sampling = Sampling(**{name: getattr(arguments, name) for name in names})
    writer = Writer(model, tokenizer, prompts, end_of_text_of(run), tuple(arguments.stop))
    alone = len(prompts) == 1 and not arguments.json
    if alone:
        print(prompts[0], end="", flush=True)
    for _, piece in writer.write(arguments.max_new_tokens, sampling):
        if alone:  # several texts grow at once, so they are shown when they are whole
            print(piece, end="", flush=True)
    texts = [
        {"prompt": prompt, "text": text, "tokens": tokens}
        for prompt, text, tokens in zip(prompts, writer.texts, writer.tokens, strict=True)
    ]
    shown = "" if alone else "\n\n".join(f"[{i}] {text['prompt']}{text['text']}" for i, text in enumerate(texts, 1))
    if alone:
        print(flush=True)
    return {"texts": texts}, shown


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {file} cannot be read as UTF-8 text: {error}") from error


def export(arguments: Namespace) -> Answer:
    run = _find(arguments.run, "runs")
    from flows.inspection import as_text
    from tasks.export.writing import export

    record = export(run, Path(arguments.output), arguments.checkpoint, arguments.dtype, arguments.max_shard_size)
    if record["custom_code"]:
        log.warning(
            "Hugging Face's Llama cannot express %s: the folder carries its own code (trust_remote_code=True).",
            ", ".join(record["custom_code"]),
        )
    return record, as_text(record)


def import_folder(arguments: Namespace) -> Answer:
    from flows.inspection import as_text
    from tasks.export.starting import write_configuration

    folder = Path(arguments.folder)
    output = Path(arguments.output or f"{folder.resolve().name}.yaml")
    record = write_configuration(folder, output, arguments.attention, arguments.segment_length)
    text = as_text(record) + f"\n\nname your text in {output} (data.files), then: infini-llama run {output}"
    return record, text


def inspect(arguments: Namespace) -> Answer:
    from flows.inspection import as_text, describe_run

    path = _find(arguments.path, "runs", "datasets")
    is_run = (path / "lineage.json").exists()
    if is_run:
        record = describe_run(path)
    else:
        from tasks.preprocess.summary import describe

        record = describe(path)
    text = as_text(record)
    if arguments.html is not None:
        from tasks.report.dataset import dataset_page
        from tasks.report.record import RunRecord
        from tasks.report.run import run_page

        record |= {"page": _write_page(arguments.html, run_page(RunRecord(path)) if is_run else dataset_page(path))}
        text += f"\n\n{record['page']}"
    return record, text


def init(arguments: Namespace) -> Answer:
    from flows.beginning import write_beginning
    from flows.inspection import as_text

    files, attention = arguments.files, arguments.attention
    if not files:
        if not sys.stdin.isatty():
            raise ConfigError("init does not know where your text is; name it with --files PATH.")
        files = [_ask("Where is your text (a folder, file or glob)?", "texts")]
        attention = attention or _ask("Attention: softmax, or infini with a memory?", "softmax")
    output = Path(arguments.output)
    record = write_beginning(output, files, output.stem, attention or "softmax", _home())
    return record, as_text(record) + f"\n\nread it, then: infini-llama run {output}"


def _ask(question: str, default: str) -> str:
    print(f"{question} [{default}] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or default


def completion(arguments: Namespace) -> Answer:
    import shtab

    script = shtab.complete(arguments.parser, arguments.shell)
    return {"shell": arguments.shell, "script": script}, script


def _write_page(file: str, content: str) -> str:
    from tasks.artifacts import write_atomic

    target = Path(file).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, content)
    return str(target)


def report(arguments: Namespace) -> Answer:
    from tasks.report.run import write_report

    record = write_report(_find(arguments.run, "runs"))
    return record, record["report"]


def evaluate(arguments: Namespace) -> Answer:
    run = _find(arguments.run, "runs")
    if arguments.stream and not arguments.files:
        raise ConfigError("--stream reads texts as one each; name them with --files.")
    from flows.inspection import evaluation_text
    from tasks.evaluate.stage import evaluate

    record = evaluate(
        run, arguments.checkpoint, arguments.files, arguments.split, arguments.sequences, arguments.stream
    )
    return record, evaluation_text(record)


def passkey(arguments: Namespace) -> Answer:
    run = _find(arguments.run, "runs")
    from flows.inspection import passkey_text
    from tasks.evaluate.stage import find_passkeys

    lengths, depths = arguments.lengths or [], arguments.depths
    record = find_passkeys(run, arguments.checkpoint, lengths, depths, arguments.samples, arguments.seed)
    return record, passkey_text(record)


def compare(arguments: Namespace) -> Answer:
    from flows.inspection import as_text
    from tasks.report.comparison import NOT_THE_SAME, columns_of_runs, compare, comparison_page, rows_of_keys

    paths = [_find(run, "runs") for run in arguments.runs]
    record = compare(paths)
    shown = {"what differs": rows_of_keys(record["differences"]), "what came of it": columns_of_runs(record["runs"])}
    text = as_text({part: rows for part, rows in shown.items() if rows})
    if not record["same_validation"]:
        log.warning(NOT_THE_SAME)
    if arguments.html is not None:
        record |= {"page": _write_page(arguments.html, comparison_page(paths, record))}
        text += f"\n\n{record['page']}"
    return record, text


def runs(arguments: Namespace) -> Answer:
    from flows.inspection import runs_text
    from tasks.housekeeping.runs import list_runs

    found = list_runs(_home())
    return {"home": str(_home()), "runs": found}, runs_text(found) if found else f"no run in {_home() / 'runs'}"


def gc(arguments: Namespace) -> Answer:
    from flows.inspection import leftovers_text
    from tasks.housekeeping.gc import Rules, collect

    rules = Rules(arguments.older_than * 86400, arguments.keep_checkpoints, arguments.unused_datasets)
    record = collect(_home(), rules, arguments.yes)
    return record, leftovers_text(record)


def _home() -> Path:
    return Path(os.environ.get("INFINI_LLAMA_HOME", "workspace")).resolve()


def _find(name: str, *kinds: str) -> Path:
    """A path as given, or the name of something in these folders of home."""
    candidates = [Path(name), *(_home() / kind / name for kind in kinds)]
    for path in candidates:
        if path.is_dir():
            return path.resolve()
    raise ConfigError(
        f"'{name}' is neither a folder nor the name of one in {' or '.join(str(path.parent) for path in candidates[1:])}."
    )


def _prefect_speaks_into(home: Path, arguments: Namespace) -> None:
    """Prefect leaves the root logger alone where it has a handler of its own, and so keeps off the terminal."""
    if arguments.verbose:
        return
    path = home / "prefect" / "client.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
