"""The slot of a deployment's concurrency limit, which its run keeps while the server is down.

A slot is leased. Prefect's engine takes a lease for 300 s, renews it after 225 s, and cancels the
run if it cannot: a server that is down for two minutes at that moment would end healthy training.
There is no setting for either. A slot that is not given back is no loss: the run that has it is
marked as crashed, by `serve` or by the automation of `deploy`, and that frees it.

Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#18802 asked for the cancellation;
PrefectHQ/prefect#21064 reports what it costs, and was closed with renewals that are tried again.
Test: `test_the_engine_cancels_a_run_whose_lease_is_lost`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

from prefect import flow_engine

from infini_llama.tasks.train.task import RUN_LEASE


def keep_slots() -> None:
    """Change Prefect's engine so that a lease outlasts an outage, and losing one ends no run.

    The change is for this process, also for other flows of it.
    """
    engine: Any = flow_engine
    maintain: Callable[..., AbstractContextManager[None]] = (
        engine.maintain_concurrency_lease
    )

    def maintain_longer(
        lease: UUID, *_: Any, **__: Any
    ) -> AbstractContextManager[None]:
        return maintain(lease, RUN_LEASE, raise_on_lease_renewal_failure=False)

    engine.maintain_concurrency_lease = maintain_longer
