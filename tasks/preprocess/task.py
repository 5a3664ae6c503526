"""preprocess as a Prefect task: cached by the key of the rows it would build."""

import logging
from pathlib import Path
from typing import Any

from prefect import task
from prefect.context import TaskRunContext
from prefect.serializers import JSONSerializer

from infini_llama.configs.errors import PipelineError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess import stage
from infini_llama.tasks.storage.results import PLAIN

log = logging.getLogger("infini_llama.preprocess")


def _key(context: TaskRunContext, inputs: dict[str, Any]) -> str:
    return result_name(inputs["key"])


def result_name(key: str) -> str:
    """Name of the file that Prefect stores the reference in."""
    return f"preprocess-{key}"


def _may_pass(task: Any, run: Any, state: Any) -> bool:
    """A fault of disk or network may pass; bad text or settings stay bad, and a fault of the program too."""
    passing = isinstance(state.data, OSError) or (isinstance(state.data, PipelineError) and state.data.exit_code == 70)
    if passing:
        log.warning("preprocess failed: %r; what is complete is kept", state.data)
    return passing


@task(
    name="preprocess",
    task_run_name="preprocess-{key}",
    cache_key_fn=_key,
    persist_result=True,
    result_serializer=JSONSerializer(**PLAIN),
    retries=2,
    retry_delay_seconds=[5, 30],
    retry_condition_fn=_may_pass,
)
def preprocess(key: str, data: dict[str, Any], home: str) -> dict[str, Any]:
    """Builds what is missing of the dataset; `key` (of `stage.plan`) decides its content and names the cached result."""
    reference = stage.preprocess(DataConfig.model_validate(data), Path(home))
    return reference.to_json()
