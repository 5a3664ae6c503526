"""patch-environment as a Prefect task: a plan for this machine and this run, neither cached nor stored by Prefect."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.patch_environment import stage


@task(name="patch-environment", cache_policy=NO_CACHE, persist_result=False)
def patch_environment(config: dict, home: str, run: str) -> dict:
    """The plan of `stage.patch_environment`; it may hold the user's environment variables, so Prefect keeps no copy."""
    return stage.patch_environment(config, home, run)
