"""verify-data as a Prefect task."""

from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.document import markdown
from infini_llama.tasks.records.dataset import DatasetRef, VerifyReport
from infini_llama.tasks.report.artifact_keys import ArtifactKeys
from infini_llama.tasks.report.dataset import dataset_document, describe
from infini_llama.tasks.verify_data.checks import verify


@task(
    name="verify-data",
    task_run_name="verify-data-{page.run}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
def verify_data(
    reference: DatasetRef,
    home: Path,
    level: str,
    page: ArtifactKeys,
) -> VerifyReport:
    """Run `verify`, and put the dataset's card on the run's page."""
    report = verify(reference, home, level)
    with best_effort("the dataset's card"):
        create_markdown_artifact(
            markdown(
                dataset_document(describe(home / reference.path), report, reference)
            ),
            key=page.key("dataset"),
            description=f"The dataset that run {page.run} trains on",
        )
    return report
