"""The sequence of stages without Prefect, with the same files and the same retries of training (Prefect also retries preprocess)."""

import time
from typing import Any

from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.secrets import refuse_blocks, without_secrets
from infini_llama.flows.naming import resolved
from infini_llama.tasks.patch_environment.requirements import check_requirements
from infini_llama.tasks.patch_environment.stage import patch_environment
from infini_llama.tasks.preprocess.stage import Preparation, lookup
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.evaluation import Evaluations
from infini_llama.tasks.records.summary import PipelineResult, RunSummary
from infini_llama.tasks.report.run import write_report
from infini_llama.tasks.runs.mirror import mirrored, restore_dataset, restore_run
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.train.attempt import new_invocation
from infini_llama.tasks.train.retries import retries_for
from infini_llama.tasks.train.stage import train
from infini_llama.tasks.verify_data.checks import verify


def run(config: PipelineConfig) -> dict[str, Any]:
    """Run preprocess, verify-data, patch-environment and train without Prefect; returns the run's summary.

    Called again with the same configuration, it resumes: what is complete on disk is not built again.

    Raises:
        PipelineError: the message says what to change; `exit_code` is that of the command line.
    """
    settings = resolved(config)
    refuse_blocks(settings)
    check_requirements(settings)
    preparation = Preparation(settings.data, settings.runtime.home)
    restore_dataset(settings, preparation.plan)
    return verify_and_train(settings, preparation.build()).to_json()


def has_finished(config: PipelineConfig) -> bool:
    """Whether the run has finished with this very configuration, which is resolved, and its dataset is the one of today's text."""
    run = RunFolder.of(config.runtime)
    if not run.lineage.exists():
        return False
    try:
        record = RunReader(run.path)
        if record.result is None or record.config != without_secrets(config).model_dump(
            mode="json", exclude={"deployment"}
        ):
            return False
        dataset = lookup(config.data, config.runtime.home)
        return dataset is not None and dataset.path == record.lineage.dataset.path
    except Damaged:  # the run itself reports and repairs it
        return False


def verify_and_train(config: PipelineConfig, dataset: DatasetRef) -> PipelineResult:
    """The stages behind preprocess; `config` is resolved, `dataset` is what preprocess returned."""
    refuse_blocks(config)
    report = verify(dataset, config.runtime.home, config.verify.level)
    restore_run(config)
    environment = patch_environment(config, dataset.vocab_size)
    retries, invocation = retries_for(config.runtime), new_invocation()
    with mirrored(config, dataset):
        while True:
            try:
                summary = train(config, dataset, environment, invocation, report.verify_on_read)
                break
            except Exception as error:
                delay = retries.delay_after(error)
                if delay is None:
                    raise
                time.sleep(delay)
        evaluations = None
        if config.evaluate.after_training:
            from infini_llama.tasks.evaluate.stage import evaluate_trained  # with torch, only needed here

            evaluations = evaluate_trained(summary.paths.run, config.evaluate)
        return finish(summary, evaluations)


def finish(summary: RunSummary, evaluations: Evaluations | None) -> PipelineResult:
    """Write the page and the loss curve of a run that has ended, unless they are there and still true; returns its result."""
    if not summary.already_finished or evaluations is not None or not summary.paths.report.exists():
        write_report(summary.paths.run)
    return PipelineResult.model_validate(dict(summary) | {"evaluations": evaluations})
