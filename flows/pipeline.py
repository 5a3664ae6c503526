"""The sequence of stages, with Prefect (pretrain.py) and without.

Both write the same files, and have the same retries of training.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig, EvaluationConfig, PipelineConfig
from infini_llama.configs.schema.section import Resume, resume_policies
from infini_llama.configs.secrets import refuse_blocks, without_secrets
from infini_llama.flows.naming import config_of_run
from infini_llama.tasks.formatting import best_effort
from infini_llama.tasks.patch_environment.requirements import check_requirements
from infini_llama.tasks.patch_environment.stage import patch_environment
from infini_llama.tasks.preprocess.rows.references import reference_for
from infini_llama.tasks.preprocess.stage import Preparation, lookup
from infini_llama.tasks.records.dataset import DatasetRef, VerifyReport
from infini_llama.tasks.records.evaluation import Evaluations
from infini_llama.tasks.records.plan import PlannedEnvironment
from infini_llama.tasks.records.summary import PipelineResult, RunSummary
from infini_llama.tasks.report.run import write_report
from infini_llama.tasks.runs.mirror import mirrored, restore_dataset, restore_run
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.storage.artifacts import MANIFEST, ROW_TABLES, Damaged, has_all_files
from infini_llama.tasks.train.attempt_folder import new_invocation
from infini_llama.tasks.train.initial import check_start
from infini_llama.tasks.train.retries import retries_for
from infini_llama.tasks.train.stage import train
from infini_llama.tasks.verify_data.checks import verify

FREE = {name for name, policy in resume_policies(DataConfig).items() if policy is Resume.FREE}
log = logging.getLogger("infini_llama.preprocess")


@dataclass(frozen=True)
class Stages:
    """The stages: functions, or tasks of Prefect that call them.

    `run_stages` calls each with the same arguments, in the same order.
    """

    preprocess: Callable[[Preparation], DatasetRef]
    verify: Callable[[DatasetRef, Path, str], VerifyReport]
    patch_environment: Callable[[PipelineConfig, int], PlannedEnvironment]
    train: Callable[[PipelineConfig, DatasetRef, PlannedEnvironment, str, bool], RunSummary]
    evaluate: Callable[[Path, EvaluationConfig], Evaluations]
    export: Callable[[Path], Path]


class DatasetOfRun(NamedTuple):
    """The complete dataset of a run that has begun, whose text has the same settings still."""

    reference: DatasetRef
    is_finished: bool


def run(config: PipelineConfig) -> dict[str, Any]:
    """Run the stages without Prefect; returns the run's summary.

    They are preprocess, verify-data, patch-environment and train, then evaluate and export if
    `config.evaluate` requests them.

    Called again with the same configuration, it resumes: what is complete on disk is not built
    again.

    Raises:
        PipelineError: the message says what to change; `exit_code` is that of the command line.
    """
    config = config_of_run(config)
    refuse_blocks(config)
    return run_stages(config, WITHOUT_PREFECT, new_invocation()).to_json()


def run_stages(config: PipelineConfig, stages: Stages, invocation: str) -> PipelineResult:
    """Run the whole pipeline.

    Args:
        config: of one run, see `config_of_run`.
        invocation: see `train`.
    """
    check_requirements(config)
    dataset = stages.preprocess(preparation_for(config))
    return verify_and_train(config, dataset, stages, invocation)


def verify_and_train(
    config: PipelineConfig, dataset: DatasetRef, stages: Stages, invocation: str
) -> PipelineResult:
    """Run the stages after preprocess, which returned `dataset`."""
    report = stages.verify(dataset, config.runtime.home, config.verify.level)
    restore_run(config)
    environment = stages.patch_environment(config, dataset.vocab_size)
    with mirrored(config, dataset):
        summary = stages.train(config, dataset, environment, invocation, report.verify_on_read)
        folder = summary.paths.run
        after = config.evaluate
        evaluations = stages.evaluate(folder, after) if after.measurements else None
        exported = stages.export(folder) if after.exports else None
        return finish(summary, evaluations, exported)


def train_with_retries(
    config: PipelineConfig,
    dataset: DatasetRef,
    environment: PlannedEnvironment,
    invocation: str,
    verify_on_read: bool,
) -> RunSummary:
    """`train`, again after each failure that the policy of retries allows."""
    retries = retries_for(config.runtime)
    with retries.until_end():
        while True:
            try:
                return train(config, dataset, environment, invocation, verify_on_read)
            except Exception as error:
                delay = retries.delay_after(error)
                if delay is None:
                    raise
                time.sleep(delay)


def evaluate(run: Path, config: EvaluationConfig) -> Evaluations:
    """Make the measurements that `config` requests of a trained run.

    This function and `export` are the only ones here that import torch, so they do it when called.
    """
    from infini_llama.tasks.evaluate.stage import evaluate_trained

    return evaluate_trained(run, config)


def export(run: Path) -> Path:
    """Export the newest checkpoint of a run as a Hugging Face folder, and return the folder."""
    from infini_llama.tasks.export.exporting import export_trained

    return export_trained(run)


WITHOUT_PREFECT = Stages(
    Preparation.build, verify, patch_environment, train_with_retries, evaluate, export
)


def preparation_for(config: PipelineConfig) -> Preparation:
    """The preparation of a run's dataset.

    It is that of today's text, or for a run that continues, of the text that it began with.

    Text that was added, changed or removed between a failure, a stop or a suspension and the next
    attempt does not end the run, and a finished run does not need its text.

    Raises:
        ConfigError, DataError: the weights that the run is to start from cannot be used.
    """
    check_start(config)
    preparation = Preparation(config.data, config.runtime.home)
    kept = dataset_of_run(config)
    if kept is None:
        restore_dataset(config, preparation.plan)
        return preparation
    reason = _reason_to_keep_old_dataset(preparation, kept)
    if reason is not None:
        log.warning(
            "%s since run %s began; the run continues with its dataset %s. "
            "Another runtime.name trains on today's text.",
            reason,
            config.runtime.name,
            kept.reference.name,
        )
        preparation.of_run = kept.reference
    return preparation


def dataset_to_train_on(config: PipelineConfig) -> DatasetRef | None:
    """The dataset that `preparation_for` leads to, if it is complete.

    No text is read, so it is None also if only reading the text would show the dataset.
    """
    kept = dataset_of_run(config)
    if kept and not kept.is_finished:
        return kept.reference
    try:
        return lookup(config.data, config.runtime.home)
    except PipelineError:
        if kept is None:
            raise
        return kept.reference


def _reason_to_keep_old_dataset(preparation: Preparation, kept: DatasetOfRun) -> str | None:
    """The reason why the run uses the dataset `kept` instead of today's text.

    Text whose files have new times is read to find out.

    Returns:
        None: the dataset is that of today's text, or the run has finished; training refuses other
        text under its name.
    """
    try:
        is_same = f"datasets/{preparation.plan().name}" == kept.reference.path
    except PipelineError as fault:
        return f"the text cannot be read as before ({str(fault).rstrip('.')})"
    return None if is_same or kept.is_finished else "the text has changed"


def dataset_of_run(config: PipelineConfig) -> DatasetOfRun | None:
    """The dataset of a run that has begun.

    Returns:
        None: the run has not begun, its dataset is not complete, or the settings of its text are
        not the same any more.
    """
    run = RunFolder.of(config.runtime)
    if not run.lineage.exists():
        return None
    try:
        record = RunReader(run.path)
        settings = _without_free(config.data.model_dump(mode="json"))
        if _without_free(record.config.get("data")) != settings:
            return None
        folder = config.runtime.home / record.lineage.dataset.path
        reference = reference_for(config.data, folder, config.runtime.home)
        dataset = changed(reference, text=record.lineage.text)
        is_whole = has_all_files(folder, "dataset") and all(
            has_all_files(folder / ROW_TABLES / table.row_table, ROW_TABLES)
            for table in dataset.row_tables
        )
        kept = DatasetOfRun(dataset, is_finished=record.result is not None)
    except (Damaged, ConfigError):  # the stages name and repair what is damaged
        return None
    return kept if is_whole and dataset.digest == record.lineage.dataset.digest else None


def _without_free(data: object) -> object:
    """The settings in `data` without those that a resumed run may change."""
    if not isinstance(data, dict):
        return None
    return {name: value for name, value in data.items() if name not in FREE}


def has_finished(config: PipelineConfig) -> bool:
    """Whether the run has finished with this very configuration, which is resolved.

    Its text must be the same, or not be readable.
    """
    run = RunFolder.of(config.runtime)
    if not run.lineage.exists():
        return False
    try:
        record = RunReader(run.path)
        if record.result is None:
            return False
        if record.config != without_secrets(config).model_dump(mode="json", exclude={"deployment"}):
            return False
        dataset = dataset_to_train_on(config)
        return dataset is not None and dataset.path == record.lineage.dataset.path
    except Damaged:  # the run itself reports and repairs it
        return False


def finish(
    summary: RunSummary, evaluations: Evaluations | None, exported: Path | None
) -> PipelineResult:
    """Write the page and the loss curve of a run that has ended, unless they are there and current.

    Returns:
        The run's result.
    """
    report = summary.paths.report
    is_changed = not summary.already_finished or evaluations is not None or not report.exists()
    if not is_changed and exported is not None:
        is_changed = (exported / MANIFEST).stat().st_mtime > report.stat().st_mtime
    if is_changed:
        with best_effort("the report", f"Write it by 'infini-llama report {summary.run}'."):
            write_report(summary.paths.run)
    return PipelineResult.model_validate(
        dict(summary) | {"evaluations": evaluations, "export": exported}
    )
