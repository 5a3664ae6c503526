"""evaluate as a Prefect task, run if `evaluate.after_training` names a measurement."""

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from infini_llama.configs.schema import EvaluationConfig
from infini_llama.tasks.evaluate.after_training import evaluate_trained


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate(run: str, config: dict[str, Any]) -> dict[str, Any]:
    """`evaluate_trained` for the run's folder `run`; `config` is the section `evaluate`."""
    return evaluate_trained(Path(run), EvaluationConfig.model_validate(config)).to_json()
