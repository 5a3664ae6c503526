"""export as a Prefect task, run if `evaluate.after_training` names it."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infini_llama.tasks.export.exporting import export_trained


@task(name="export", task_run_name="export-{run.name}", cache_policy=NO_CACHE, persist_result=False, retries=0)
def export(run: Path) -> Path:
    """`export_trained` for the run's folder `run`."""
    return export_trained(run)
