"""The commands that run stages: run, preprocess, verify, train, join, doctor and estimate."""

import os
import shlex
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from pydantic import JsonValue

from infini_llama.configs.errors import DataError, PipelineError
from infini_llama.configs.loading import load_config
from infini_llama.configs.reading import JsonObject, expanded
from infini_llama.configs.schedulers import refuse_several_on_a_node
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.secrets import (
    refuse_blocks,
    refuse_passwords,
    without_secrets,
)
from infini_llama.flows.cli.console import Answer, summary_text
from infini_llama.flows.naming import config_of_run, find, home_folder
from infini_llama.flows.starts import start_of_command, with_name
from infini_llama.tasks.records.decision import Decision
from infini_llama.tasks.records.summary import RunSummary
from infini_llama.tasks.runs.run_folder import RunFolder


def run(arguments: Namespace) -> Answer:
    refuse_several_on_a_node(os.environ)
    written = load_config(arguments.config, arguments.overrides)
    start = start_of_command(written)
    if arguments.dry_run:
        return dry_run(start.claim(written, is_dry=True))
    config = start.claim(written)
    if joined := _joins(config):
        return joined
    # The stages resolve it again, where they are executed.
    named = with_name(written, config.runtime.name)
    from infini_llama.flows import pipeline
    from infini_llama.flows.server import api_for_run, has_api, log_into, prepare_client

    home = config.runtime.home
    prepare_client(home)
    # A server of its own would start only to record that there was nothing to do.
    if arguments.no_prefect or (not has_api() and pipeline.has_finished(config)):
        summary = pipeline.run(named)
    else:
        refuse_passwords(named)
        log_into(home, arguments.verbose)
        with api_for_run(home):
            from prefect import tags

            from infini_llama.flows.executions import folder_of
            from infini_llama.flows.lost_runs import LostRuns, correct_states
            from infini_llama.flows.pretrain import pretrain, tags_of

            correct_states(LostRuns(folder_of(home)), at_once=True)
            with tags(*tags_of(named)):
                summary = pretrain(named)
            assert isinstance(summary, dict)  # only a scheduled run is skipped
    return summary, summary_text(RunSummary.model_validate(summary))


def dry_run(config: PipelineConfig) -> Answer:
    """Show what `run` would do.

    That is the resolved configuration, the plan, the parameters, and what is complete on disk.
    """
    import yaml

    from infini_llama.flows.cli.tables import as_text, estimate_text
    from infini_llama.flows.dataset_choice import choose_dataset
    from infini_llama.tasks.estimate.run import estimate as estimate_run
    from infini_llama.tasks.patch_environment.stage import pinned_settings
    from infini_llama.tasks.preprocess.corpus import Corpus
    from infini_llama.tasks.records.plan import EnvironmentRecord
    from infini_llama.tasks.runs.run_reader import RunReader

    home = config.runtime.home
    run_folder = RunFolder.of(config.runtime)
    dataset = choose_dataset(config, reads_text=False).lookup()
    workers: Decision | None = None
    if dataset is None:
        workers = Corpus(config.data, home).choose_workers().choice
    reader = None if run_folder.read_lineage() is None else RunReader(run_folder.path)
    cached: JsonObject = {
        "dataset": None if dataset is None else str(home / dataset.path),
        "run": str(run_folder.path),
        "state": "new" if reader is None else reader.state,
        "step": 0 if reader is None else reader.step,
    }
    shown = without_secrets(config).model_dump(mode="json", exclude={"deployment"})
    before = run_folder.find(EnvironmentRecord, run_folder.environment)
    planned, estimated = estimate_run(config, pinned_settings(run_folder, before))
    plan = planned.masked().to_json()
    choices: list[JsonValue] = [choice.to_json() for choice in planned.choices]
    if workers is not None:
        choices.insert(0, workers.to_json())
    record: JsonObject = {
        "config": shown,
        "chosen": choices,
        "plan": plan,
        "estimate": estimated.to_json(),
        "cached": cached,
    }
    described = _plan_and_choices(plan, choices)
    if plan["findings"]:
        described["findings"] = plan["findings"]
    parts = (
        yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip(),
        as_text(described),
        estimate_text(estimated),
        as_text({"cached": cached}),
    )
    return record, "\n\n".join(parts) + "\n\nnothing was started (--dry-run)"


def _plan_and_choices(plan: JsonObject, choices: list[JsonValue]) -> JsonObject:
    """The settings of a plan, and what was chosen by rule with the reason of each."""
    return {
        "plan": {
            key: value
            for key, value in plan.items()
            if not isinstance(value, dict | list)
        },
        "chosen": choices,
    }


def preprocess(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import reference_text
    from infini_llama.flows.dataset_choice import require_dataset_of_run
    from infini_llama.tasks.preprocess import stage
    from infini_llama.tasks.train.initial import check_start

    config = config_of_run(load_config(arguments.config, arguments.overrides))
    home = config.runtime.home
    # The weights may be elsewhere.
    if config.train.init_from and expanded(config.train.init_from).exists():
        check_start(config)
    reference = stage.preprocess(config.data, home, repair=arguments.repair)
    if arguments.repair:
        require_dataset_of_run(config, reference)
    return reference.to_json(), reference_text(reference, home)


def verify(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import as_text
    from infini_llama.tasks.formatting import in_words
    from infini_llama.tasks.preprocess.rows.references import reference_to_all
    from infini_llama.tasks.verify_data.checks import verify as verify_dataset

    path, home = _dataset_and_home(arguments.dataset)
    level = "deep" if arguments.deep else "quick"
    report = verify_dataset(reference_to_all(path, home), home, level, sys.maxsize)
    record: JsonObject = {"dataset": str(path), **report.to_json()}
    text = as_text(in_words(record))
    if arguments.html is not None:
        from infini_llama.flows.cli.runs import written
        from infini_llama.tasks.report.dataset import measured_dataset
        from infini_llama.tasks.report.page import page as as_page

        page = written(arguments.html, as_page(measured_dataset(path, report)))
        return record | {"report": str(page)}, f"{text}\n\n{page}"
    return record, text


def _dataset_and_home(name: str) -> tuple[Path, Path]:
    """The folder that a name means, or that of the dataset of a configuration; and the home.

    Raises:
        DataError: the dataset of the configuration is not built.
    """
    from infini_llama.flows.dataset_choice import choose_dataset

    if not Path(name).is_file():
        return find(name, "datasets"), home_folder()
    config = config_of_run(load_config(name))
    preparation = choose_dataset(config, reads_text=True)
    if preparation.of_run is None:
        preparation.plan()
    reference = preparation.lookup()
    if reference is None:
        raise DataError(
            f"the dataset of {name} is not built; run infini-llama preprocess {shlex.quote(name)}."
        )
    return config.runtime.home / reference.path, config.runtime.home


def doctor(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import as_text
    from infini_llama.tasks.patch_environment.doctor import doctor as examine

    config = None
    home = home_folder()
    if arguments.config is not None:
        from infini_llama.tasks.estimate.run import vocabulary_of

        config = config_of_run(load_config(arguments.config, arguments.overrides))
        home = config.runtime.home
        # A tokenizer or weights may not be here yet: preprocess names them.
        with suppress(PipelineError):
            config = config.with_vocab_size(vocabulary_of(config))
    against = None if arguments.against is None else find(arguments.against, "runs")
    report = examine(config, home, against, strict=arguments.strict)
    record = report.to_json()
    shown: JsonObject = {"findings": record["findings"]}
    if report.plan is not None:
        choices: list[JsonValue] = [choice.to_json() for choice in report.plan.choices]
        shown |= _plan_and_choices(report.plan.to_json(), choices)
    shown["patches"] = record["patches"]
    if since := report.against:
        shown |= since.model_dump(mode="json", exclude={"run"}) | {"against": since.run}
    return record, as_text({part: value for part, value in shown.items() if value})


def estimate(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import estimate_text
    from infini_llama.tasks.estimate.run import estimate as estimate_run

    _, record = estimate_run(
        config_of_run(load_config(arguments.config, arguments.overrides))
    )
    return record.to_json(), estimate_text(record)


def train(arguments: Namespace) -> Answer:
    from infini_llama.flows.dataset_choice import choose_dataset
    from infini_llama.flows.pipeline import WITHOUT_PREFECT, verify_and_train
    from infini_llama.tasks.patch_environment.requirements import check_requirements
    from infini_llama.tasks.train.attempt_folder import new_invocation

    refuse_several_on_a_node(os.environ)
    written = load_config(arguments.config, arguments.overrides)
    config = start_of_command(written).claim(written)
    if joined := _joins(config):
        return joined
    refuse_blocks(config)
    check_requirements(config)
    named = None if arguments.dataset is None else find(arguments.dataset, "datasets")
    reference = choose_dataset(config, reads_text=False, named=named).lookup()
    if reference is None:
        raise DataError(
            f"the dataset of {arguments.config} is not built yet; name one with --dataset, or run: "
            f"infini-llama preprocess {shlex.quote(arguments.config)}"
        )
    summary = verify_and_train(config, reference, WITHOUT_PREFECT, new_invocation())
    return summary.to_json(), summary_text(summary)


def join(arguments: Namespace) -> Answer:
    refuse_several_on_a_node(os.environ)
    path = Path(arguments.run)
    is_path = path.exists() or len(path.parts) > 1
    folder = path.absolute() if is_path else home_folder() / "runs" / path
    return _join(
        folder, os.environ.get("PET_MASTER_ADDR") or os.environ.get("MASTER_ADDR")
    )


def _joins(config: PipelineConfig) -> Answer | None:
    """Join the run instead of supervising it, if this node's rank is not 0.

    Args:
        config: resolved.
    """
    environment = config.environment
    if environment.nnodes == 1 or environment.node_rank in ("auto", 0):
        return None
    address = None if environment.master_addr == "auto" else environment.master_addr
    return _join(RunFolder.of(config.runtime).path, address)


def _join(folder: Path, master_addr: str | None) -> Answer:
    from infini_llama.tasks.train.nodes import join as join_run

    code = join_run(RunFolder(folder), master_addr)
    ending = f" with {code}" if code else ""
    return {
        "run": str(folder),
        "exit_code": code,
    }, f"joined      {folder}: it has ended" + ending
