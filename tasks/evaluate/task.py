"""evaluate as a Prefect task, run where `evaluate.after_training` asks for it."""

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from infini_llama.tasks.evaluate.after_training import evaluate_trained


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate(run: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """`evaluate_trained` for the run's folder `run`."""
    return evaluate_trained(Path(run), wanted)
