"""evaluate as a Prefect task, run if `evaluate.after_training` names a measurement."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infini_llama.configs.schema import EvaluationConfig
from infini_llama.tasks.evaluate.stage import evaluate_trained
from infini_llama.tasks.records.evaluation import Evaluations


@task(name="evaluate", task_run_name="evaluate-{run.name}", cache_policy=NO_CACHE, persist_result=False, retries=0)
def evaluate(run: Path, config: EvaluationConfig) -> Evaluations:
    """`evaluate_trained` for the run's folder `run`."""
    return evaluate_trained(run, config)
