"""The sequence of stages without Prefect, with the same files and the same retry policy."""

import time
from datetime import datetime
from pathlib import Path

from infini_llama.configs.schema import EvaluationConfig, PipelineConfig
from infini_llama.flows.home import usable_home
from infini_llama.flows.mirroring import mirrored, restore_dataset, restore_run
from infini_llama.tasks.clusters.launchers import ConfiguredLauncher
from infini_llama.tasks.patch_environment.requirements import check_requirements
from infini_llama.tasks.patch_environment.stage import patch_environment
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.report.run import write_report
from infini_llama.tasks.train.attempt import new_invocation
from infini_llama.tasks.train.retries import retries_for
from infini_llama.tasks.train.stage import train
from infini_llama.tasks.verify_data.checks import verify


def run(config: PipelineConfig) -> dict:
    """Run preprocess, verify-data, patch-environment and train without Prefect; returns the run's summary.

    Called again with the same configuration, it resumes: what is complete on disk is not built again.

    Raises:
        PipelineError: the message says what to change; `exit_code` is that of the command line.
    """
    settings = resolved(config)
    check_requirements(PipelineConfig.model_validate(settings))
    restore_dataset(settings)
    reference = preprocess(config.data, Path(settings["runtime"]["home"]))
    return verify_and_train(settings, reference)


def resolved(config: PipelineConfig, due: datetime | None = None) -> dict:
    """The configuration of one run as a dict, with its name in full and the absolute path of home.

    Args:
        due: scheduled start, for names with {date} or {time} (local time zone); None: now.
    """
    settings = config.model_dump(mode="json", exclude={"deployment"})
    settings["runtime"]["home"] = str(usable_home(config.runtime.home, "runtime.home"))
    settings["runtime"]["name"] = run_name(config.runtime.name, due)
    return settings


def run_name(template: str, due: datetime | None = None) -> str:
    """nightly-{date} as nightly-2026-11-21; {time} is hours, minutes and seconds."""
    moment = datetime.now() if due is None else due.astimezone()
    return template.replace("{date}", f"{moment:%Y-%m-%d}").replace("{time}", f"{moment:%H%M%S}")


def verify_and_train(settings: dict, reference: DatasetRef) -> dict:
    """The stages behind preprocess; `reference` is what it returned."""
    config = PipelineConfig.model_validate(settings)
    home, checks = settings["runtime"]["home"], settings["verify"]
    report = verify(reference, Path(home), checks["level"], checks["full_below"])
    restore_run(settings)
    environment = patch_environment(config, config.runtime.name, reference.vocab_size)
    retries, invocation = retries_for(config.runtime), new_invocation()
    launcher = ConfiguredLauncher(config.environment)
    with mirrored(settings, reference):
        while True:
            try:
                summary = train(config, reference, environment, invocation, report.verify_on_read, launcher).to_json()
                break
            except Exception as error:
                delay = retries.delay_after(error)
                if delay is None:
                    raise
                time.sleep(delay)
        if settings["evaluate"]["after_training"]:
            from infini_llama.tasks.evaluate.after_training import (
                evaluate_trained,  # with torch, which nothing else needs here
            )

            section = EvaluationConfig.model_validate(settings["evaluate"])
            summary["evaluations"] = evaluate_trained(Path(summary["paths"]["run"]), section).to_json()
        return with_pages(summary)


def with_pages(summary: dict) -> dict:
    """The summary of a finished run, once its page and loss curve are written beside it."""
    news = not summary.get("already_finished") or "evaluations" in summary
    if news or not Path(summary["paths"]["report"]).exists():
        write_report(Path(summary["paths"]["run"]))
    return summary
