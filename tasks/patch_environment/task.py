"""patch-environment as a Prefect task: a plan for this machine and this run, neither cached nor stored by Prefect."""

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from infini_llama.tasks.formatting import artifact_key, best_effort
from infini_llama.tasks.patch_environment import stage
from infini_llama.tasks.patch_environment.card import card
from infini_llama.tasks.patch_environment.findings import judge


@task(name="patch-environment", cache_policy=NO_CACHE, persist_result=False)
def patch_environment(config: dict, home: str, run: str, vocab_size: int) -> dict:
    """The plan of `stage.patch_environment`; it may hold the user's environment variables, so Prefect keeps no copy."""
    plan = stage.patch_environment(config, home, run, vocab_size)
    with best_effort("the environment's card"):
        record = plan["record"]  # secrets are masked
        create_markdown_artifact(
            card(record, [*judge(record["facts"]), *plan["findings"]]),
            key=artifact_key("environment", run),
            description=f"What run {run} is computed on",
        )
    return plan
