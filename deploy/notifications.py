"""Send a POST to an address when a run of infini-llama completes, fails or crashes.

    export PREFECT_API_URL=http://127.0.0.1:4200/api
    python deploy/notifications.py https://hooks.example.com/services/...

Slack, Mattermost and Teams show the field `text`. The address is kept in the webhook block
`infini-llama-notifications`, as a secret. Running it again with another address changes the block.
"""

import sys

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.events import (
    AutomationCore,
    CallWebhook,
    EventTrigger,
    Posture,
    ResourceSpecification,
)
from prefect.settings import get_current_settings

NAME = "infini-llama-notifications"
TEXT = (
    '{"text": {{ (flow_run.name ~ ": " ~ flow_run.state.name ~ ". " '
    '~ (flow_run.state.message or "")) | tojson }}}'
)


def notify(address: str) -> None:
    """Create or change the block and the automation on the server of PREFECT_API_URL."""
    block = Webhook(url=address, method="POST").save(NAME, overwrite=True)  # pyright: ignore[reportArgumentType]
    automation = AutomationCore(
        name=NAME,
        description="A POST when a run of infini-llama completes, fails or crashes.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(
                {"prefect.resource.id": "prefect.tag.infini-llama"}
            ),
            expect={
                f"prefect.flow-run.{state}"
                for state in ("Completed", "Failed", "Crashed")
            },
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[CallWebhook(block_document_id=block, payload=TEXT)],  # pyright: ignore[reportArgumentType]
    )
    with get_client(sync_client=True) as client:
        known = client.read_automations_by_name(NAME)
        if known:
            client.update_automation(known[0].id, automation)
        else:
            client.create_automation(automation)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith(("http://", "https://")):
        sys.exit(
            "notifications.py needs one address, such as https://hooks.example.com/services/T000/B000."
        )
    if get_current_settings().api.url is None:
        sys.exit(
            "no Prefect server is configured; set PREFECT_API_URL, for example http://127.0.0.1:4200/api."
        )
    notify(sys.argv[1])
