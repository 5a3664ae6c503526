"""The flow: raw text to a trained model, in four stages between which only small dicts travel."""

import logging
from pathlib import Path

from prefect import flow

from configs.schema import PipelineConfig
from flows.api_logs import api_logs
from tasks.patch_environment.task import patch_environment
from tasks.preprocess.stage import lookup, plan
from tasks.preprocess.task import preprocess
from tasks.train.retries import retries_for
from tasks.train.task import with_retries
from tasks.verify_data.task import verify_data, verify_data_deep

log = logging.getLogger("infini_llama.preprocess")


@flow(name="pretrain", flow_run_name="{config.runtime.name}", persist_result=False)
def pretrain(config: PipelineConfig) -> dict:
    """Preprocess, verify-data, patch-environment, train; returns the run's summary.

    Called again with the same configuration it carries on: what is complete on disk is not built again.
    """
    settings = config.model_dump(mode="json")
    home = settings["runtime"]["home"] = str(config.runtime.home.resolve())
    data, full_below = settings["data"], settings["verify"]["full_below"]
    stored = Path(home) / "prefect-results"

    with api_logs():
        # Prefect would serve a cached reference whose dataset is gone, so the disk is asked first.
        known = lookup(data, home)
        key = known["chunks"] if known else plan(data, home)["chunks_key"][:12]
        cached = preprocess.with_options(result_storage=stored, refresh_cache=known is None)
        state = cached(key, data, home, return_state=True)
        reference = state.result()
        if state.name == "Cached":
            log.info("dataset %s: cached, nothing to do", Path(reference["path"]).name)

        report = verify_data(reference, home, full_below)
        reference["verify_on_read"] = report["verify_on_read"]
        if config.verify.level == "deep":
            digest = f"{reference['digest']}-{reference['chunks_digest']}"
            verify_data_deep.with_options(result_storage=stored)(digest, reference, home, full_below)

        environment = patch_environment(settings, home, config.runtime.name, reference["vocab_size"])
        return with_retries(retries_for(settings))(settings, reference, environment)
