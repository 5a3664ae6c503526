"""What a Prefect server must know of this project: work pool, limits, automation and deployments.

Deploying again writes only what differs: Prefect deletes the scheduled runs of a deployment or schedule that is written.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.events import AutomationCore, ChangeFlowRunState, EventTrigger, Posture, ResourceSpecification
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import load_config
from infini_llama.configs.schema import DeploymentConfig, PipelineConfig, ScheduleConfig
from infini_llama.configs.secrets import refuse_secrets
from infini_llama.flows.form import form
from infini_llama.flows.pretrain import pretrain, tags_of
from infini_llama.flows.scheduled import Changes, changes_of
from infini_llama.flows.settings import RUN, STREAM_OUTPUT
from infini_llama.tasks.train.task import GPU_LIMIT

SILENT_FOR = timedelta(minutes=5)
ZOMBIES = "infini-llama: silent runs are crashed"


@dataclass(frozen=True)
class Offer:
    """One deployment. schedules: what each schedule changes of the configuration, by its name."""

    name: str
    config: PipelineConfig
    schedules: dict[str, Changes]

    def parameters(self) -> dict[str, Any]:
        """The flow's parameters: every key in full, so that the form shows what a run will have.

        Home is left out unless the configuration sets it: the default is that of the machine that runs, not of the one that
        deploys.
        """
        unset = set() if "home" in self.config.runtime.model_fields_set else {"home"}
        config = self.config.model_dump(mode="json", exclude={"deployment": True, "runtime": unset})
        return {"config": config} | ({"schedules": self.schedules} if self.schedules else {})


def read_offers(files: Sequence[str]) -> list[Offer]:
    """One deployment per file.

    Raises:
        ConfigError: a configuration or one of its schedules is wrong, or holds a secret.
    """
    return [offer_of(Path(file).stem, load_config(file), partial(load_config, file)) for file in files]


def offer_of(name: str, config: PipelineConfig, overridden: Callable[[Sequence[str]], PipelineConfig]) -> Offer:
    """The deployment of a configuration. overridden: the configuration with these overrides."""
    refuse_secrets(config)
    schedules: dict[str, Changes] = {}
    for schedule in config.deployment.schedules:
        try:
            CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
        except ValueError as error:
            raise ConfigError(f"deployment.schedules: {error}") from error
        if schedule.overrides:
            changed = overridden(schedule.overrides)
            refuse_secrets(changed)
            schedules[schedule.name] = changes_of(config, changed)
    return Offer(name, config, schedules)


def deploy(offers: Sequence[Offer], gpus: int | None = None, silent_for: timedelta = SILENT_FOR) -> dict[str, Any]:
    """Bring the server of PREFECT_API_URL up to these configurations.

    Args:
        gpus: how many GPUs all runs together may hold at a time; None: no limit is set.
        silent_for: a run without a heartbeat for this long is marked as crashed.

    Returns:
        {"deployments": names with the flow's before them, "work_pools", "limits", "automations"}.
    """
    pools = sorted({offer.config.deployment.work_pool for offer in offers}) or [default_pool()]
    with get_client(sync_client=True) as client:
        for pool in pools:
            _work_pool(client, pool)
        if gpus is not None:
            client.upsert_global_concurrency_limit_by_name(GPU_LIMIT, gpus)
        _automation(client, silent_for)
        names = [_deployment(client, offer) for offer in offers]
    limits = [] if gpus is None else [GPU_LIMIT]
    return {"deployments": names, "work_pools": pools, "limits": limits, "automations": [ZOMBIES]}


def default_pool() -> str:
    """The work pool of configurations that name none."""
    return DeploymentConfig().work_pool


def definition(offer: Offer) -> RunnerDeployment:
    """The deployment as Prefect takes it, without its schedules."""
    name, config, offered = offer.name, offer.config, offer.config.deployment
    limit = ConcurrencyLimitConfig(
        limit=offered.concurrency_limit, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE
    ) if offered.concurrency_limit else None  # fmt: skip
    deployment = RunnerDeployment.from_flow(
        pretrain,
        name,
        parameters=offer.parameters(),
        concurrency_limit=limit,
        work_pool_name=offered.work_pool,
        tags=[*tags_of(config), f"deployment:{name}"],
        version=version_of(offer),
        description=f"{pretrain.name} with the configuration {name}. Runs with the same name resume the same training.",
        job_variables={
            "working_dir": str(Path.cwd()),
            "env": run_variables(),
            "stream_output": STREAM_OUTPUT,
        },
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    deployment._parameter_openapi_schema = form(config)
    return deployment


def version_of(offer: Offer) -> str:
    """Version of a deployment: of the program, of the configuration and of its schedules."""
    schedules = offer.config.deployment.model_dump(mode="json")["schedules"]
    parts = {"config": offer.parameters()["config"], "schedules": schedules}
    digests = [hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:8] for part in parts.values()]
    return f"{version('infini-llama')}+{'.'.join(digests)}"


def run_variables() -> dict[str, str]:
    """Environment variables of a deployment's runs; with what makes Python find this program where it is not installed."""
    here = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return RUN | here


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
    if not (known := client.read_automations_by_name(ZOMBIES)):
        client.create_automation(zombies)
    elif (
        known[0].description != zombies.description
    ):  # the only setting is in it; a rewritten one forgets what it watches
        client.update_automation(known[0].id, zombies.model_copy(update={"enabled": known[0].enabled}))


def _deployment(client: SyncPrefectClient, offer: Offer) -> str:
    wanted = definition(offer)
    found = _find(client, wanted.full_name)
    if found is None or not _is_same(found, wanted):
        deployment_id = wanted.apply()
        assert isinstance(deployment_id, UUID)
    else:
        deployment_id = found.id
    former = found.version or "" if found else ""
    keep_active = former.rpartition(".")[2] == version_of(offer).rpartition(".")[2]
    _schedules(client, deployment_id, offer.config.deployment.schedules, keep_active)
    return wanted.full_name


def _find(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def _is_same(found: DeploymentResponse, wanted: RunnerDeployment) -> bool:
    limit = found.global_concurrency_limit
    if (limit and limit.limit) != wanted.concurrency_limit:
        return False
    if found.parameter_openapi_schema != wanted._parameter_openapi_schema.model_dump(exclude_unset=True):
        return False
    fields = ("parameters", "description", "tags", "version", "entrypoint", "job_variables", "work_pool_name")
    return all(getattr(found, field) == getattr(wanted, field) for field in fields)


def _schedules(
    client: SyncPrefectClient,
    deployment: UUID,
    schedules: list[ScheduleConfig],
    keep_active: bool,
) -> None:
    """Make the deployment's schedules these, and no others; one that is as it was keeps its waiting runs.

    Args:
        keep_active: a schedule that was switched on or off on the server stays so.
    """
    known = {one.slug: one for one in client.read_deployment_schedules(deployment)}
    for schedule in schedules:
        wanted = DeploymentScheduleCreate(
            schedule=CronSchedule(cron=schedule.cron, timezone=schedule.timezone),
            active=schedule.active,
            slug=schedule.name,
        )
        old = known.pop(schedule.name, None)
        if old is None:
            client.create_deployment_schedules(deployment, [wanted])
            continue
        active = old.active if keep_active else wanted.active
        if (old.schedule, old.active) != (wanted.schedule, active):
            client.update_deployment_schedule(deployment, old.id, active=active, schedule=wanted.schedule)
    for removed in known.values():
        client.delete_deployment_schedule(deployment, removed.id)
