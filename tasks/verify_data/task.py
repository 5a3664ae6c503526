"""verify-data as Prefect tasks: the quick check runs every time, the deep one once for the same bytes and the same checks."""

from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.serializers import JSONSerializer

from infini_llama.tasks.document import markdown
from infini_llama.tasks.formatting import RunPage, best_effort
from infini_llama.tasks.preprocess.summary import dataset_document, describe
from infini_llama.tasks.records.dataset import DatasetRef, VerifyReport
from infini_llama.tasks.storage.results import PLAIN
from infini_llama.tasks.verify_data.checks import VERIFIER_VERSION, verify


def _key(context: TaskRunContext, inputs: dict[str, Any]) -> str:
    return result_name(inputs["digest"])


def result_name(digest: str) -> str:
    """Name of the file that Prefect stores the report of a deep check in."""
    return f"verify-data-v{VERIFIER_VERSION}-{digest.replace(':', '-')}"


@task(name="verify-data", task_run_name="verify-data-{page.run}", cache_policy=NO_CACHE, persist_result=False)
def verify_data(reference: DatasetRef, home: Path, page: RunPage) -> VerifyReport:
    """Manifests, sizes and tokenizer; every checksum too where the dataset is not large."""
    report = verify(reference, home, "quick")
    with best_effort("the dataset's card"):  # here, since preprocess itself does not run where its result is cached
        create_markdown_artifact(
            markdown(dataset_document(describe(home / reference.path), report, reference)),
            key=page.key("dataset"),
            description=f"The dataset that run {page.run} trains on",
        )
    return report


@task(name="verify-data-deep", cache_key_fn=_key, persist_result=True, result_serializer=JSONSerializer(**PLAIN))
def verify_data_deep(digest: str, reference: DatasetRef, home: Path) -> dict[str, Any]:
    """Every checksum, token and row; `digest` stands for the bytes of both levels, and so names the cached report.

    Returns:
        the fields of a `VerifyReport`, as JSON because Prefect stores them.
    """
    return verify(reference, home, "deep").to_json()
