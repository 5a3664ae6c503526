"""preprocess as a Prefect task: cached by the settings and by the places, sizes and times of the text."""

import logging
from typing import Any

from prefect import task
from prefect.context import TaskRunContext
from prefect.serializers import JSONSerializer

from infini_llama.configs.errors import ExitCode, PipelineError
from infini_llama.tasks.preprocess.stage import Preparation
from infini_llama.tasks.storage.results import PLAIN

log = logging.getLogger("infini_llama.preprocess")


def _key(context: TaskRunContext, inputs: dict[str, Any]) -> str:
    return result_name(inputs["key"])


def result_name(key: str) -> str:
    """Name of the file that Prefect stores the reference in."""
    return f"preprocess-{key}"


def _is_transient(task: Any, run: Any, state: Any) -> bool:
    """A fault of disk or network may pass; bad text or settings stay bad, and a fault of the program too."""
    passing = isinstance(state.data, OSError) or (
        isinstance(state.data, PipelineError) and state.data.exit_code == ExitCode.UNEXPECTED
    )
    if passing:
        log.warning("preprocess failed: %r; finished work is kept", state.data)
    return passing


@task(
    name="preprocess",
    task_run_name="preprocess-{key}",
    cache_key_fn=_key,
    persist_result=True,
    result_serializer=JSONSerializer(**PLAIN),
    retries=2,
    retry_delay_seconds=[5, 30],
    retry_condition_fn=_is_transient,
)
def preprocess(key: str, preparation: Preparation) -> dict[str, Any]:
    """Builds what is missing of the dataset.

    Args:
        key: of the settings and the listing of the text; names the cached result.

    Returns:
        the fields of a `DatasetRef`, as JSON because Prefect stores them.
    """
    return preparation.build().to_json()
