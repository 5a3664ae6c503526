"""The flow: raw text to a trained model, in four stages which pass small JSON values."""

import logging
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.secrets import restored
from infini_llama.flows.api_logs import api_logs
from infini_llama.flows.mirroring import mirrored, restore_dataset, restore_run
from infini_llama.flows.pipeline import resolved, run_name, with_pages
from infini_llama.tasks.clusters.launchers import ConfiguredLauncher
from infini_llama.tasks.patch_environment.requirements import check_requirements
from infini_llama.tasks.patch_environment.task import patch_environment
from infini_llama.tasks.preprocess import task as preprocess_task
from infini_llama.tasks.preprocess.rows.tables import digest_of_tables, name_of_tables
from infini_llama.tasks.preprocess.stage import lookup, plan
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.report.task import closing_card
from infini_llama.tasks.storage.results import trusted
from infini_llama.tasks.train.attempt import new_invocation
from infini_llama.tasks.train.retries import retries_for
from infini_llama.tasks.train.task import with_retries
from infini_llama.tasks.verify_data import task as verify_task

log = logging.getLogger("infini_llama.preprocess")


def _name() -> str:
    config: PipelineConfig = flow_run.parameters["config"]
    return run_name(config.runtime.name, flow_run.scheduled_start_time)


@flow(name="pretrain", flow_run_name=_name, persist_result=False)
def pretrain(config: PipelineConfig) -> dict:
    """Preprocess, verify-data, patch-environment, train; returns the run's summary.

    Called again with the same configuration, it resumes: what is complete on disk is not built again.
    """
    settings = restored(resolved(config, flow_run.scheduled_start_time))
    home, run = settings["runtime"]["home"], settings["runtime"]["name"]
    full_below = settings["verify"]["full_below"]
    stored = Path(home) / "prefect-results"

    with api_logs():
        check_requirements(PipelineConfig.model_validate(settings))
        restore_dataset(settings)
        # Prefect would return a cached reference whose dataset is gone, so the disk is checked first.
        known = lookup(config.data, Path(home))
        key = name_of_tables(known or plan(config.data, Path(home)))
        use_cache = known is not None and trusted(stored / preprocess_task.result_name(key))
        cached = preprocess_task.preprocess.with_options(result_storage=stored, refresh_cache=not use_cache)
        state = cached(key, settings["data"], home, return_state=True)
        reference = DatasetRef.from_json(state.result())
        if state.name == "Cached":
            log.info("dataset %s: cached, nothing to do", reference.name)

        report = verify_task.verify_data(reference.to_json(), home, full_below, run)
        dataset = reference.to_json() | {"verify_on_read": report["verify_on_read"]}
        if config.verify.level == "deep":
            digest = f"{reference.digest}-{digest_of_tables(reference)}"
            fresh = not trusted(stored / verify_task.result_name(digest))
            deep = verify_task.verify_data_deep.with_options(result_storage=stored, refresh_cache=fresh)
            deep(digest, reference.to_json(), home, full_below)

        restore_run(settings)
        environment = patch_environment(settings, run, reference.vocab_size)
        with mirrored(settings, reference):
            with closing_card(Path(home) / "runs" / run) as report:
                launcher = ConfiguredLauncher(PipelineConfig.model_validate(settings).environment)
                train = with_retries(retries_for(PipelineConfig.model_validate(settings).runtime))
                summary = train(settings, dataset, environment, new_invocation(), launcher)
                done = "had already finished" if summary.get("already_finished") else "finished"
                report(f"Training {done}: {summary['steps']:,} steps.")
            if settings["evaluate"]["after_training"]:
                from infini_llama.tasks.evaluate.task import evaluate  # with torch, which nothing else needs here

                summary["evaluations"] = evaluate(summary["paths"]["run"], settings["evaluate"])
            return with_pages(summary)
