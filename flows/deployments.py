"""What a Prefect server must know of this project: work pool, limits, automations and deployments. Doing it again changes nothing."""

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, StateType
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.events import AutomationCore, ChangeFlowRunState, EventTrigger, Posture, ResourceSpecification
from prefect.exceptions import ObjectAlreadyExists
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import load_config
from infini_llama.configs.schema import PipelineConfig, ScheduleConfig
from infini_llama.configs.secrets import refuse_secrets
from infini_llama.flows.pretrain import pretrain
from infini_llama.flows.settings import RUN
from infini_llama.tasks.train.task import GPU_LIMIT

SILENT_FOR = timedelta(minutes=5)
ZOMBIES = "infini-llama: silent runs are crashed"


def deploy(files: Sequence[str], gpus: int | None = None, silent_for: timedelta = SILENT_FOR) -> dict[str, Any]:
    """Brings the server of PREFECT_API_URL up to these configurations.

    Args:
        files: a deployment for each.
        gpus: how many GPUs all runs together may hold at a time; None: no limit is set.
        silent_for: a run without a heartbeat for this long is marked as crashed.

    Returns:
        {"deployments": names with the flow's before them, "work_pools", "limits", "automations"}.

    Raises:
        ConfigError: a configuration or one of its schedules is wrong.
    """
    configs = [(Path(file).stem, load_config(file), _scheduled(file)) for file in files]
    pools = sorted({config.deployment.work_pool for _, config, _ in configs}) or [default_pool()]
    with get_client(sync_client=True) as client:
        for pool in pools:
            _work_pool(client, pool)
        if gpus is not None:
            client.upsert_global_concurrency_limit_by_name(GPU_LIMIT, gpus)
        _automation(client, silent_for)
        names = [_deployment(client, config.deployment.name or stem, config, runs) for stem, config, runs in configs]
    limits = [] if gpus is None else [GPU_LIMIT]
    return {"deployments": names, "work_pools": pools, "limits": limits, "automations": [ZOMBIES]}


def default_pool() -> str:
    """The work pool of configurations that name none."""
    from infini_llama.configs.schema import DeploymentConfig

    return DeploymentConfig().work_pool


def parameters_of(config: PipelineConfig) -> dict[str, Any]:
    """The flow's parameters: every key in full, so that the form shows what a run will have.

    Raises:
        ConfigError: they would hold secrets.
    """
    refuse_secrets(config)
    return {"config": config.model_dump(mode="json", exclude={"deployment"})}


def _scheduled(file: str) -> Callable[[ScheduleConfig], dict[str, Any]]:
    def parameters(schedule: ScheduleConfig) -> dict[str, Any]:
        return parameters_of(load_config(file, schedule.overrides)) if schedule.overrides else {}

    return parameters


def _work_pool(client: SyncPrefectClient, name: str) -> None:
    pool = WorkPoolCreate(
        name=name,
        type=ProcessWorker.type,
        base_job_template=ProcessWorker.get_default_base_job_template(),
        description="Runs of infini-llama, as processes of a machine.",
    )
    with contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(pool)


def _automation(client: SyncPrefectClient, silent_for: timedelta) -> None:
    """A run whose heartbeats stop without an end is marked as crashed: its machine is gone, or the process is stuck."""
    of_the_flow = ResourceSpecification({"prefect.resource.role": "flow", "prefect.resource.name": pretrain.name})
    zombies = AutomationCore(
        name=ZOMBIES,
        description=f"A run of {pretrain.name} without a heartbeat for {silent_for.total_seconds():.0f} s is marked as crashed.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=of_the_flow,
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=silent_for,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name="Crashed",
                force=False,
                message=f"No heartbeat for {silent_for.total_seconds():.0f} s. Retry resumes from the newest checkpoint.",
            )
        ],
    )
    if known := client.read_automations_by_name(ZOMBIES):
        client.update_automation(known[0].id, zombies)
    else:
        client.create_automation(zombies)


def _deployment(
    client: SyncPrefectClient,
    name: str,
    config: PipelineConfig,
    scheduled: Callable[[ScheduleConfig], dict[str, Any]],
) -> str:
    offered = config.deployment
    strategy = {"enqueue": ConcurrencyLimitStrategy.ENQUEUE, "cancel_new": ConcurrencyLimitStrategy.CANCEL_NEW}
    limit = ConcurrencyLimitConfig(
        limit=offered.concurrency_limit, collision_strategy=strategy[offered.on_collision]
    ) if offered.concurrency_limit else None  # fmt: skip
    deployment = RunnerDeployment.from_flow(
        pretrain,
        name,
        parameters=parameters_of(config),
        concurrency_limit=limit,
        work_pool_name=offered.work_pool,
        description=f"{pretrain.name} with the configuration {name}. Runs of one name carry on the same training.",
        # Without a pipe to the worker, whose death would otherwise be the run's; its logs are files, and lines on its page.
        job_variables={"working_dir": str(Path.cwd()), "env": _environment(), "stream_output": False},
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    deployment_id = deployment.apply()
    assert isinstance(deployment_id, UUID)
    _schedules(client, deployment_id, offered.schedules, scheduled)
    return f"{pretrain.name}/{name}"


def _environment() -> dict[str, str]:
    """For the runs; with what makes Python find this program where it is not installed."""
    return RUN | {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


def _schedules(
    client: SyncPrefectClient,
    deployment: UUID,
    schedules: list[ScheduleConfig],
    scheduled: Callable[[ScheduleConfig], dict[str, Any]],
) -> None:
    """The deployment's schedules are these, and no others; one that is as it was keeps its runs to come."""
    try:
        wanted = [
            DeploymentScheduleCreate(
                schedule=CronSchedule(cron=one.cron, timezone=one.timezone),
                active=one.active,
                parameters=scheduled(one),
                slug=one.name,
            )
            for one in schedules
        ]
    except ValueError as error:
        raise ConfigError(f"deployment.schedules: {error}") from error
    for old in client.read_deployment_schedules(deployment):
        same = [
            new
            for new in wanted
            if (new.slug, new.schedule, new.active, new.parameters)
            == (old.slug, old.schedule, old.active, old.parameters)
        ]
        if same:
            wanted.remove(same[0])
        else:
            client.delete_deployment_schedule(deployment, old.id)
    if wanted:
        client.create_deployment_schedules(deployment, wanted)
