"""preprocess as a Prefect task: cached by the key of the rows it would build."""

from typing import Any

from prefect import task
from prefect.context import TaskRunContext

from configs.errors import PipelineError
from tasks.preprocess import stage


def _key(context: TaskRunContext, inputs: dict[str, Any]) -> str:
    return f"preprocess-{inputs['key']}"


def _may_pass(task: Any, run: Any, state: Any) -> bool:
    """A passing fault of disk or machine is worth another try; what a person must change is not."""
    return not isinstance(state.data, PipelineError)


@task(
    name="preprocess",
    task_run_name="preprocess-{key}",
    cache_key_fn=_key,
    persist_result=True,
    result_serializer="json",
    retries=2,
    retry_delay_seconds=[10, 60],
    retry_condition_fn=_may_pass,
)
def preprocess(key: str, data: dict, home: str) -> dict:
    """Builds what is missing of the dataset; `key` (of `stage.plan`) decides its content and names the cached result."""
    return stage.preprocess(data, home)
