"""The preprocess task of Prefect.

Prefect stores no result of it: whether a dataset is complete is read from the disk.
"""

import logging
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed

from infini_llama.configs.errors import ExitCode, PipelineError
from infini_llama.tasks.preprocess.stage import Preparation
from infini_llama.tasks.report.artifact_keys import ArtifactKeys

log = logging.getLogger("infini_llama.preprocess")


def _is_transient(task: Any, run: Any, state: Any) -> bool:
    """Whether a failure may pass.

    Faults of disk or network may; bad text, bad settings and faults of the program do not.
    """
    passing = isinstance(state.data, OSError) or (
        isinstance(state.data, PipelineError)
        and state.data.exit_code == ExitCode.UNEXPECTED
    )
    if passing:
        log.warning("preprocess failed: %r; finished work is kept", state.data)
    return passing


@task(
    name="preprocess",
    task_run_name="preprocess-{page.run}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=[5, 30],
    retry_condition_fn=_is_transient,
)
def preprocess(preparation: Preparation, page: ArtifactKeys) -> Any:
    """Build what is missing of the dataset.

    Returns:
        a final state, named Cached if nothing was missing; its result is the DatasetRef.
    """
    dataset = preparation.build()
    return Completed(name="Completed" if dataset.built else "Cached", data=dataset)
