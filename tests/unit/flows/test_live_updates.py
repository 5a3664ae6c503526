"""Heartbeats of a run that a command executes."""

import time
from types import SimpleNamespace

import pytest
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from infini_llama.flows import live_updates as module
from support.waiting import wait_until


@pytest.fixture
def emitted(monkeypatch) -> list[tuple[str, dict, list]]:
    """What a flow run 1 of the flow 2 emits."""
    found: list[tuple[str, dict, list]] = []
    context = SimpleNamespace(
        flow_run=SimpleNamespace(id=1, name="run", flow_id=2, tags=["nightly"]), flow=SimpleNamespace(name="pretrain")
    )
    monkeypatch.setattr(module, "FlowRunContext", SimpleNamespace(get=lambda: context))
    monkeypatch.setattr(module, "emit_event", lambda name, resource, related: found.append((name, resource, related)))
    return found


def test_they_come_at_once_and_again_and_do_not_delay_the_end(emitted):
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        with module.heartbeats(0.01):
            wait_until(lambda: len(emitted) >= 2, 10)
        with module.heartbeats(3600):
            started = time.monotonic()
        assert time.monotonic() - started < 0.5
    name, resource, (flow, tag) = emitted[0]
    assert name == "prefect.flow-run.heartbeat" and resource["prefect.resource.id"] == "prefect.flow-run.1"
    assert (flow["prefect.resource.role"], flow["prefect.resource.name"]) == ("flow", "pretrain")
    assert (tag["prefect.resource.role"], tag["prefect.resource.id"]) == ("tag", "prefect.tag.nightly")


def test_there_are_none_where_prefect_sends_its_own(emitted):
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: 30}), module.heartbeats(0.01):
        time.sleep(0.1)
    assert not emitted
