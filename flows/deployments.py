"""The objects of this project on a Prefect server: work pool, limits, automation and deployments.

Deploying again writes only what differs: Prefect 3.9.1 deletes the scheduled runs of a deployment
or schedule that is written, also late ones (PrefectHQ/prefect#17764), and switches schedules on
again (PrefectHQ/prefect#14973).
"""

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import (
    ConcurrencyLimitConfig,
    ConcurrencyLimitStrategy,
    StateType,
)
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.events import (
    AutomationCore,
    ChangeFlowRunState,
    EventTrigger,
    Posture,
    ResourceSpecification,
)
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
from infini_llama.flows.settings import RUN, STREAM_OUTPUT, TAG
from infini_llama.tasks.train.task import GPU_LIMIT

# In the name of a deployment: Prefect 3.9.1 refuses the first four, and does not encode the others
# in its URLs. No issue upstream is known.
UNUSABLE = {"%", "&", "<", ">", "?", "#"}
SILENT_FOR = timedelta(minutes=10)  # longer than a run waits for a server that is down
PENDING_FOR = 6 * SILENT_FOR  # a run may wait for a node or an image
SILENT = "infini-llama: silent runs are crashed"
PENDING = "infini-llama: runs that do not start are crashed"
CANCELLING = "infini-llama: runs that are cancelling are cancelled"


@dataclass(frozen=True)
class Deployment:
    """A configuration as it is deployed.

    Attributes:
        schedules: what each schedule changes of the configuration, by its name.
    """

    name: str
    config: PipelineConfig
    schedules: dict[str, Changes] = field(default_factory=dict)

    def parameters(self) -> dict[str, Any]:
        """The flow's parameters: every key in full, so that the form shows what a run will have.

        Home is left out unless the configuration sets it: the default is that of the machine that
        runs, not of the one that deploys.
        """
        unset = set() if "home" in self.config.runtime.model_fields_set else {"home"}
        config = self.config.model_dump(
            mode="json", exclude={"deployment": True, "runtime": unset}
        )
        parameters = {
            "config": config,
            "not_text": self.config.data.not_text,
            "schedules": self.schedules,
        }
        return {name: value for name, value in parameters.items() if value}

    def version(self) -> str:
        """Version of the program, and digests of the configuration and of its schedules."""
        schedules = self.config.deployment.model_dump(mode="json")["schedules"]
        config = self.parameters()["config"]
        return f"{version('infini-llama')}+{_digest(config)}.{_digest(schedules)}"

    def to_prefect(self) -> RunnerDeployment:
        """The deployment as Prefect takes it, without its schedules."""
        settings = self.config.deployment
        limit = None
        if settings.concurrency_limit:
            limit = ConcurrencyLimitConfig(
                limit=settings.concurrency_limit,
                collision_strategy=ConcurrencyLimitStrategy.ENQUEUE,
                # After the five minutes of Prefect 3.9.1, a run that waits gets the slot, and the
                # one that then starts is cancelled (PrefectHQ/prefect#19840).
                grace_period_seconds=int(PENDING_FOR.total_seconds()),
            )
        # Where this program is not installed, Python needs the path to find it.
        python_path = {
            name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ
        }
        deployment = RunnerDeployment.from_flow(
            pretrain,
            self.name,
            parameters=self.parameters(),
            concurrency_limit=limit,
            work_pool_name=settings.work_pool,
            tags=[*tags_of(self.config), f"deployment:{self.name}"],
            version=self.version(),
            description=f"{pretrain.name} with the configuration {self.name}. "
            "Runs with the same name resume the same training.",
            job_variables={
                "working_dir": str(Path.cwd()),
                "env": RUN | python_path,
                "stream_output": STREAM_OUTPUT,
            },
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        # Private to Prefect 3.9.1, which makes the form from the flow alone. Its own command sets
        # it, too. No issue upstream is known.
        deployment._parameter_openapi_schema = form(self.config)
        return deployment


def read_deployments(files: Sequence[str]) -> list[Deployment]:
    """The deployment of each configuration file, which is named after it.

    Raises:
        ConfigError: a configuration is wrong, two files have the same name, or a name cannot be
            that of a deployment.
    """
    named: dict[str, str] = {}
    for file in files:
        name = Path(file).stem
        if unusable := sorted(UNUSABLE & set(name)):
            raise ConfigError(
                f"{file}: its deployment would be {pretrain.name}/{name}, and the name of a "
                f"deployment cannot contain {' or '.join(unusable)}; rename the file."
            )
        # Prefect 3.9.1 would leave it out of the name (PrefectHQ/prefect#17446, closed, reports the
        # same of every ending).
        if name.endswith(".py"):
            raise ConfigError(
                f"{file}: the name of a deployment cannot end with .py; rename the file."
            )
        if name in named:
            raise ConfigError(
                f"{named[name]} and {file} have the same name, and would both be the deployment "
                f"{pretrain.name}/{name}; rename one of them."
            )
        named[name] = file
    return [read_deployment(file) for file in files]


def read_deployment(file: str) -> Deployment:
    """The deployment of a configuration file.

    Raises:
        ConfigError: the configuration or one of its schedules is wrong, or holds a secret.
    """
    config = load_config(file)
    refuse_secrets(config)
    schedules: dict[str, Changes] = {}
    for schedule in config.deployment.schedules:
        _refuse_wrong_cron(schedule)
        if schedule.overrides:
            overridden = load_config(file, schedule.overrides)
            refuse_secrets(overridden)
            schedules[schedule.name] = changes_of(config, overridden)
    return Deployment(Path(file).stem, config, schedules)


def _refuse_wrong_cron(schedule: ScheduleConfig) -> None:
    """Refuse a schedule that the scheduler of Prefect 3.9.1 would make no run of.

    Only the server's log would have the error. No issue upstream is known.

    Raises:
        ConfigError: its cron expression is not valid, or no such date exists.
    """
    from prefect.server.schemas.schedules import CronSchedule as PrefectsCron

    what = (
        f"deployment.schedules: cron={schedule.cron!r} of the schedule {schedule.name}"
    )
    try:
        cron = PrefectsCron(cron=schedule.cron, timezone=schedule.timezone)
    except ValueError as error:
        raise ConfigError(
            f"{what} is not valid; give minute (0-59), hour (0-23), day of month (1-31), month "
            "(1-12) and day of week (0-6, 0 is Sunday), for example '0 2 * * *'."
        ) from error
    try:
        asyncio.run(cron.get_dates(1))
    except ValueError as error:
        raise ConfigError(
            f"{what} is never due: no such date exists; change it."
        ) from error


def deploy(
    deployments: Sequence[Deployment],
    gpus: int | None = None,
    silent_for: timedelta = SILENT_FOR,
) -> dict[str, Any]:
    """Bring the server of PREFECT_API_URL up to these configurations.

    Args:
        gpus: how many GPUs all runs together may hold at a time; None: no limit is set.
        silent_for: a run without an event for this long is ended.

    Returns:
        {"deployments": names with the flow's before them, "work_pools", "limits", "automations"}.
    """
    pools = sorted(
        {deployment.config.deployment.work_pool for deployment in deployments}
    )
    pools = pools or [DeploymentConfig().work_pool]
    with get_client(sync_client=True) as client:
        for pool in pools:
            _create_work_pool(client, pool)
        if gpus is not None:
            client.upsert_global_concurrency_limit_by_name(GPU_LIMIT, gpus)
        automations = _automations(silent_for)
        for automation in automations:
            _write_automation(client, automation)
        names = [_write_deployment(client, deployment) for deployment in deployments]
    limits = [] if gpus is None else [GPU_LIMIT]
    return {
        "deployments": names,
        "work_pools": pools,
        "limits": limits,
        "automations": [automation.name for automation in automations],
    }


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def _create_work_pool(client: SyncPrefectClient, name: str) -> None:
    pool = WorkPoolCreate(
        name=name,
        type=ProcessWorker.type,
        base_job_template=ProcessWorker.get_default_base_job_template(),
        description="Runs of infini-llama, as processes of a machine.",
    )
    with contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(pool)


def _automations(silent_for: timedelta) -> list[AutomationCore]:
    """A run without progress is ended: its machine is gone, or its process is stopped.

    A run that trains sends heartbeats. One that is pending sends nothing, and may wait for a node
    or an image: it has longer. One that is cancelling still sends heartbeats, and a rule of Prefect
    lets it only be cancelled (PrefectHQ/prefect#20275).

    The server of Prefect 3.9.1 does not end such runs itself (PrefectHQ/prefect#16746, open). Its
    documentation has the automation for silent runs ("detect zombie flows").
    """
    pending = ["Pending", "Submitting", "InfrastructurePending"]
    ends = ["Cancelled", "Completed", "Failed", "Crashed"]
    return [
        _automation(
            SILENT,
            after=["heartbeat"],
            expect=["*"],
            within=silent_for,
            state=StateType.CRASHED,
            fault="no heartbeat",
        ),
        _automation(
            PENDING,
            after=pending,
            expect=["*"],
            within=6 * silent_for,
            state=StateType.CRASHED,
            fault="no start",
        ),
        _automation(
            CANCELLING,
            after=["Cancelling"],
            expect=ends,
            within=silent_for,
            state=StateType.CANCELLED,
            fault="no end of cancelling",
        ),
    ]


def _automation(
    name: str,
    after: Sequence[str],
    expect: Sequence[str],
    within: timedelta,
    state: StateType,
    fault: str,
) -> AutomationCore:
    """An automation that puts a run into `state` if no event in `expect` follows one in `after`."""
    # Another program's flow may have the same name.
    tag = ResourceSpecification({"prefect.resource.id": f"prefect.tag.{TAG}"})
    again = "Retry starts the run again, from the newest checkpoint if it has one."
    seconds = f"{within.total_seconds():.0f} s"
    return AutomationCore(
        name=name,
        description=f"A run of infini-llama is {state.value.lower()}: {fault} for {seconds}.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=tag,
            after={f"prefect.flow-run.{event}" for event in after},
            expect={f"prefect.flow-run.{event}" for event in expect},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=within,
        ),
        actions=[
            ChangeFlowRunState(
                state=state,
                name=state.value.title(),
                force=False,
                message=f"{fault.capitalize()} for {seconds}. {again}",
            )
        ],
    )


def _write_automation(client: SyncPrefectClient, automation: AutomationCore) -> None:
    stored = client.read_automations_by_name(automation.name)
    if not stored:
        client.create_automation(automation)
        return
    # One that is the same is left alone: Prefect 3.9.1 resets what a rewritten automation watches.
    # No issue of Prefect's is known; PrefectHQ/prefect-operator#316 reports it.
    compared = ("description", "trigger", "actions")
    if any(
        getattr(stored[0], field) != getattr(automation, field) for field in compared
    ):
        client.update_automation(
            stored[0].id, automation.model_copy(update={"enabled": stored[0].enabled})
        )


def _write_deployment(client: SyncPrefectClient, deployment: Deployment) -> str:
    """Write what differs on the server, and return the full name."""
    current = deployment.to_prefect()
    try:
        stored = client.read_deployment_by_name(current.full_name)
    except ObjectNotFound:
        stored = None
    schedules = deployment.config.deployment.schedules
    if stored is not None:
        # While one of them has no name, Prefect 3.9.1 replaces them all. No issue of it is known.
        _delete_other_schedules(client, stored.id, schedules)
        current.paused = stored.paused
    if stored is None or not _is_same(stored, current):
        deployment_id = current.apply()
        assert isinstance(deployment_id, UUID)
    else:
        deployment_id = stored.id
    stored_version = (stored.version if stored else "") or ""
    same_schedules = (
        stored_version.rpartition(".")[2] == deployment.version().rpartition(".")[2]
    )
    _write_schedules(client, deployment_id, schedules, keep_active=same_schedules)
    return current.full_name


def _is_same(stored: DeploymentResponse, current: RunnerDeployment) -> bool:
    limit = stored.global_concurrency_limit
    if (limit and limit.limit) != current.concurrency_limit:
        return False
    # Private, see `to_prefect`.
    schema = current._parameter_openapi_schema.model_dump(exclude_unset=True)
    if stored.parameter_openapi_schema != schema:
        return False
    fields = (
        "parameters",
        "description",
        "tags",
        "version",
        "entrypoint",
        "job_variables",
        "work_pool_name",
    )
    return all(getattr(stored, field) == getattr(current, field) for field in fields)


def _delete_other_schedules(
    client: SyncPrefectClient, deployment: UUID, schedules: list[ScheduleConfig]
) -> None:
    """Delete the deployment's schedules that are not among these.

    Those made in the UI have no name.
    """
    names = {schedule.name for schedule in schedules}
    for schedule in client.read_deployment_schedules(deployment):
        if schedule.slug not in names:
            client.delete_deployment_schedule(deployment, schedule.id)


def _write_schedules(
    client: SyncPrefectClient,
    deployment: UUID,
    schedules: list[ScheduleConfig],
    keep_active: bool,
) -> None:
    """Write the schedules that are new or changed.

    An unchanged one keeps its scheduled runs.

    Args:
        keep_active: a schedule that was switched on or off on the server stays so.
    """
    stored = client.read_deployment_schedules(deployment)
    by_name = {schedule.slug: schedule for schedule in stored}
    for schedule in schedules:
        cron = CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
        old = by_name.get(schedule.name)
        if old is None:
            new = DeploymentScheduleCreate(
                schedule=cron, active=schedule.active, slug=schedule.name
            )
            client.create_deployment_schedules(deployment, [new])
            continue
        active = old.active if keep_active else schedule.active
        if (old.schedule, old.active) != (cron, active):
            client.update_deployment_schedule(
                deployment, old.id, active=active, schedule=cron
            )
