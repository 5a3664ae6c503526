"""Confirm suspensions for the automation for silent runs.

The automation waits for an event after each heartbeat of a run. The event of the suspension is not
enough. The run sends heartbeats until its checkpoint is saved, and a server that was started again
in the last minutes keeps the event back: it has not seen the one before. So a suspension is
confirmed by an event that follows no other.

Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#18653, open, the same after a run's end.
Test: `test_an_event_waits_for_the_one_before`.
"""

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.events.related import tags_as_related_resources
from prefect.events.schemas.events import Event, Resource

from infini_llama.flows.settings import TAG

CONFIRMATION = "prefect.flow-run.still-suspended"


def confirm_suspensions(client: SyncPrefectClient) -> None:
    """Confirm each suspension of this program's runs whose newest event is another one.

    The process of such a run was killed, or its events are lost.
    """
    suspended = {
        "state": {"type": {"any_": ["PAUSED"]}},
        "deployment_id": {"is_null_": False},
        "tags": {"all_": [TAG]},
    }
    for run in client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(suspended)
    ):
        own = EventResourceFilter(id=[_resource(run)])
        events = EventFilter(
            event=EventNameFilter(prefix=["prefect.flow-run."]), resource=own
        )
        newest = client.read_events(events, limit=1).events  # the latest first
        if not newest or newest[0].event != CONFIRMATION:
            confirm(client, run)


def confirm(client: SyncPrefectClient, run: FlowRun) -> None:
    """Send the event that confirms the suspension of a run of this program."""
    resource = Resource(
        {"prefect.resource.id": _resource(run), "prefect.resource.name": run.name}
    )
    related = tags_as_related_resources([TAG])
    event = Event(event=CONFIRMATION, resource=resource, related=related)
    client.request("POST", "/events", json=[event.model_dump(mode="json")])


def _resource(run: FlowRun) -> str:
    return f"prefect.flow-run.{run.id}"
