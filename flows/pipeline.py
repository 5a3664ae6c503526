"""The sequence of stages, with Prefect (pretrain.py) and without.

Both write the same files, and have the same retries of training.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.schema import EvaluationConfig, PipelineConfig
from infini_llama.configs.secrets import refuse_blocks, without_secrets
from infini_llama.flows.dataset_choice import choose_dataset, dataset_of_run
from infini_llama.flows.starts import start_of_command
from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.patch_environment.requirements import check_requirements
from infini_llama.tasks.patch_environment.stage import patch_environment
from infini_llama.tasks.preprocess.stage import Preparation
from infini_llama.tasks.records.dataset import DatasetRef, VerifyReport
from infini_llama.tasks.records.evaluation import Evaluations
from infini_llama.tasks.records.plan import PlannedEnvironment
from infini_llama.tasks.records.summary import PipelineResult, RunSummary
from infini_llama.tasks.report.run import write_report
from infini_llama.tasks.runs.mirror import mirrored, restore_dataset, restore_run
from infini_llama.tasks.storage.artifacts import MANIFEST
from infini_llama.tasks.tokenizers.encoder import encoder_of_dataset
from infini_llama.tasks.train.attempt_folder import new_invocation
from infini_llama.tasks.train.initial import check_start
from infini_llama.tasks.train.retries import retries_for
from infini_llama.tasks.train.stage import train
from infini_llama.tasks.verify_data.checks import verify


@dataclass(frozen=True)
class Stages:
    """The stages: functions, or tasks of Prefect that call them.

    `run_stages` calls each with the same arguments, in the same order.
    """

    preprocess: Callable[[Preparation], DatasetRef]
    verify: Callable[[DatasetRef, Path, str], VerifyReport]
    patch_environment: Callable[[PipelineConfig, int], PlannedEnvironment]
    train: Callable[
        [PipelineConfig, DatasetRef, PlannedEnvironment, str, bool], RunSummary
    ]
    evaluate: Callable[[Path, EvaluationConfig], Evaluations]
    export: Callable[[Path], Path]


def run(config: PipelineConfig) -> dict[str, Any]:
    """Run the stages without Prefect; returns the run's summary.

    They are preprocess, verify-data, patch-environment and train, then evaluate and export if
    `config.evaluate` requests them.

    Called again with the same configuration, it resumes: what is complete on disk is not built
    again.

    Raises:
        PipelineError: the message says what to change; `exit_code` is that of the command line.
    """
    config = start_of_command(config).claim(config)
    refuse_blocks(config)
    return run_stages(config, WITHOUT_PREFECT, new_invocation()).to_json()


def run_stages(
    config: PipelineConfig, stages: Stages, invocation: str
) -> PipelineResult:
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
    refuse_short_passkeys(config, dataset)
    restore_run(config)
    environment = stages.patch_environment(config, dataset.vocab_size)
    with mirrored(config, dataset):
        summary = stages.train(
            config, dataset, environment, invocation, report.verify_on_read
        )
        folder = summary.paths.run
        after = config.evaluate
        evaluations = mistake = None
        try:
            if after.measurements:
                evaluations = stages.evaluate(folder, after)
        except (ConfigError, DataError) as error:
            mistake = error  # export and report need no measurement
        exported = stages.export(folder) if after.exports else None
        result = finish(summary, evaluations, exported)
        if mistake is not None:
            raise mistake
        return result


def refuse_short_passkeys(config: PipelineConfig, dataset: DatasetRef) -> None:
    """Refuse lengths of `evaluate` that are too short to be measured, before training.

    Raises:
        ConfigError: see `least_length`.
    """
    lengths = config.evaluate.passkey_lengths
    if "passkey" not in config.evaluate.measurements or not lengths:
        return
    from infini_llama.tasks.evaluate.passkey import least_length

    least = least_length(encoder_of_dataset(config.runtime.home / dataset.path))
    if min(lengths) < least:
        raise ConfigError(
            f"evaluate.passkey_lengths has {min(lengths)}: the number and the question alone take "
            f"up to {least} tokens; give at least that many."
        )


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
    """The preparation of a run's dataset, which is restored from the mirror if it is new here.

    Raises:
        ConfigError, DataError: the weights that the run is to start from cannot be used.
    """
    check_start(config)
    preparation = choose_dataset(config, reads_text=True)
    if preparation.of_run is None:
        restore_dataset(config, preparation.plan)
    return preparation


def has_finished(config: PipelineConfig) -> bool:
    """Whether the run has finished with this very configuration, which is resolved.

    Its text must be the same, or not be readable.
    """
    begun = dataset_of_run(config)
    if begun is None or not begun.is_finished:
        return False
    if begun.config != without_secrets(config).model_dump(
        mode="json", exclude={"deployment"}
    ):
        return False
    dataset = choose_dataset(config, reads_text=False).lookup()
    return dataset is not None and dataset.path == begun.reference.path


def finish(
    summary: RunSummary, evaluations: Evaluations | None, exported: Path | None
) -> PipelineResult:
    """Write the page and the loss curve of a run that has ended, unless they are there and current.

    Returns:
        The run's result.
    """
    report = summary.paths.report
    is_changed = (
        not summary.already_finished or evaluations is not None or not report.exists()
    )
    if not is_changed and exported is not None:
        is_changed = (exported / MANIFEST).stat().st_mtime > report.stat().st_mtime
    if is_changed:
        with best_effort(
            "the report", f"Write it by 'infini-llama report {summary.run}'."
        ):
            write_report(summary.paths.run)
    return PipelineResult.model_validate(
        dict(summary) | {"evaluations": evaluations, "export": exported}
    )
