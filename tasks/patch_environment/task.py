"""patch-environment as a Prefect task: a plan for this machine and this run, neither cached nor stored by Prefect."""

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.formatting import RunPage, best_effort
from infini_llama.tasks.patch_environment import stage
from infini_llama.tasks.patch_environment.card import card
from infini_llama.tasks.records.plan import PatchedEnvironment


@task(
    name="patch-environment", task_run_name="patch-environment-{page.run}", cache_policy=NO_CACHE, persist_result=False
)
def patch_environment(config: PipelineConfig, vocab_size: int, page: RunPage) -> PatchedEnvironment:
    """`stage.patch_environment`; the result may hold the user's environment variables, so Prefect keeps no copy."""
    environment = stage.patch_environment(config, page.run, vocab_size)
    with best_effort("the environment's card"):
        create_markdown_artifact(
            card(environment.record, environment.plan),
            key=page.key("environment"),
            description=f"What run {page.run} is computed on",
        )
    return environment
