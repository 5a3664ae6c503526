"""Deploying again writes an automation that differs from the server's, and no other."""

from unittest.mock import Mock
from uuid import uuid4

import pytest
from prefect.events import Automation, AutomationCore
from prefect.server.events.schemas import automations as server

from infini_llama.flows.deployments import SILENT_FOR, _automations, _write_automation


def as_stored(automation: AutomationCore) -> Automation:
    """The automation as the server answers with it, which a person has switched off."""
    content = automation.model_dump(mode="json") | {"enabled": False}
    stored = server.Automation(id=uuid4(), **content)
    return Automation.model_validate(stored.model_dump(mode="json"))


def written(stored: Automation, automation: AutomationCore) -> list[AutomationCore]:
    """What is written where the server has `stored`."""
    client = Mock(read_automations_by_name=Mock(return_value=[stored]))
    _write_automation(client, automation)
    assert not client.create_automation.called
    return [call.args[1] for call in client.update_automation.call_args_list]


@pytest.mark.parametrize(
    "automation", _automations(SILENT_FOR), ids=lambda each: each.name
)
def test_an_automation_is_written_again_if_a_version_has_changed_it(automation):
    stored = as_stored(automation)
    assert written(stored, automation) == []
    trigger = stored.trigger.model_copy(update={"expect": {"prefect.flow-run.other"}})
    action = stored.actions[0].model_copy(update={"message": "other"})
    for change in (
        {"description": "other"},
        {"trigger": trigger},
        {"actions": [action]},
    ):
        (update,) = written(stored.model_copy(update=change), automation)
        assert update == automation.model_copy(update={"enabled": False})
