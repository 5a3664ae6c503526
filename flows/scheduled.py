"""The start of a scheduled run.

It applies the overrides of its schedule, and is skipped if a later run is due too.
"""

import logging
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from prefect import State
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled
from prefect.types._datetime import now  # private to Prefect 3.9.1

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.schema import PipelineConfig
from infini_llama.flows.naming import has_time

Changes = dict[str, dict[str, Any]]  # section, key, value
log = logging.getLogger("infini_llama.prefect")


def changes_of(base: PipelineConfig, overridden: PipelineConfig) -> Changes:
    """The keys whose values differ, with those of `overridden`."""
    before, after = (
        config.model_dump(mode="json", exclude={"deployment"})
        for config in (base, overridden)
    )
    changes = {
        section: {
            key: value for key, value in keys.items() if value != before[section][key]
        }
        for section, keys in after.items()
    }
    return {section: keys for section, keys in changes.items() if keys}


@dataclass(frozen=True)
class Schedule:
    """The schedule that has created a run.

    Attributes:
        timezone: of its clock.
    """

    name: str
    timezone: str


def with_schedule(
    config: PipelineConfig, schedules: dict[str, Changes]
) -> PipelineConfig:
    """The configuration of this flow run, with what its schedule changes, if it has one.

    A deployment keeps these changes in its own parameters: the server of Prefect 3.9.1 drops those
    of a schedule that is paused. PrefectHQ/prefect#17380, closed, reports it of the switch in the
    UI.

    Raises:
        ConfigError: the schedule of this run is no longer on the server, so that its overrides are
            not known.
    """
    schedule = _schedule() if schedules else None
    if schedule is None:
        return config
    settings = config.model_dump(mode="json", exclude={"deployment"})
    for section, keys in schedules.get(schedule.name, {}).items():
        settings[section] |= keys
    return parse_config(settings)


def due(name: str) -> datetime | None:
    """Scheduled start of this flow run, for a run of this name; None: it was not scheduled.

    A name with {date} or {time} has those of the schedule's own time zone: in another one, two runs
    of a daily schedule can have the same date. For a run that a person started, they are those of
    this machine.

    Raises:
        ConfigError: the schedule of this run is no longer on the server, so that its time zone is
            not known.
    """
    start = flow_run.scheduled_start_time
    schedule = _schedule() if has_time(name) else None
    timezone = ZoneInfo(schedule.timezone) if schedule else None
    return start and start.astimezone(timezone)


def _schedule() -> Schedule | None:
    """The schedule that created this flow run; None: a person started it."""
    return _read_schedule(flow_run.id) if flow_run.id and deployment.id else None


@lru_cache(maxsize=1)  # the name of the flow run and the run itself need it
def _read_schedule(run: str) -> Schedule | None:
    with get_client(sync_client=True) as client:
        current = client.read_flow_run(UUID(run))
        schedule_id = _schedule_id(current)
        if schedule_id is None or current.deployment_id is None:
            return None
        for schedule in client.read_deployment_schedules(current.deployment_id):
            if schedule.id == schedule_id:
                timezone = getattr(schedule.schedule, "timezone", None) or "UTC"
                return Schedule(schedule.slug or "", timezone)
    raise ConfigError(
        "the schedule that created this run was deleted, and with it its overrides and time zone; "
        "start another run."
    )


def superseded() -> State | None:
    """The final state of this flow run if its schedule has a later run that is due or has begun.

    A worker may begin several late runs at once, in any order. Those that still wait are cancelled
    here, so that no process is started for them.

    Prefect 3.9.1 executes all, the oldest first; PrefectHQ/prefect#15886, open, asks for this.

    Returns:
        None: the flow run is to be executed.
    """
    if not flow_run.id or not deployment.id:
        return None
    with get_client(sync_client=True) as client:
        current = client.read_flow_run(UUID(flow_run.id))
        if _schedule_id(current) is None or _has_run_before(client, current.id):
            return None
        later = _later_runs(client, current)
        if not later:
            return None
        newest, *older = later
        message = (
            "Skipped: the run of the same schedule for "
            f"{newest.expected_start_time} is due as well."
        )
        waiting = [
            run for run in older if run.state is not None and run.state.is_scheduled()
        ]
        for run in waiting:
            client.set_flow_run_state(run.id, Cancelled(message=message))
    log.warning(
        "%d late run(s) of this schedule are skipped; only the newest is executed",
        1 + len(waiting),
    )
    # A new state: as documented, Prefect takes one that was sent for another run as that run's,
    # and ends this run with a state of its own, without the message.
    return Cancelled(message=message)


def _has_run_before(client: SyncPrefectClient, run: UUID) -> bool:
    """Whether a person has started the flow run again, which is running now.

    Its number of runs does not count what Resume starts, see `newest_scheduled`. A run that was
    cancelled while it waited has never been running before.
    """
    states = client.read_flow_run_states(run)
    return sum(state.is_running() for state in states) > 1 or any(
        state.is_paused() or state.is_final() for state in states
    )


def _later_runs(client: SyncPrefectClient, current: FlowRun) -> list[FlowRun]:
    """Runs of the schedule of `current` that are due after it, the newest first.

    A person may have cancelled some: those are left out.
    """
    later = FlowRunFilter.model_validate(
        {
            "id": {"not_any_": [current.id]},
            "deployment_id": {"any_": [current.deployment_id]},
            "state": {"type": {"not_any_": ["CANCELLED", "CANCELLING"]}},
            "expected_start_time": {
                "after_": current.expected_start_time,
                "before_": now("UTC"),
            },
        }
    )
    runs = client.read_flow_runs(
        flow_run_filter=later, sort=FlowRunSort.EXPECTED_START_TIME_DESC
    )
    return [run for run in runs if _schedule_id(run) == _schedule_id(current)]


def _schedule_id(run: FlowRun) -> UUID | None:
    return (
        run.created_by.id
        if run.created_by and run.created_by.type == "SCHEDULE"
        else None
    )
