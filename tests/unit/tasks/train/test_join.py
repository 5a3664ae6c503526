"""A node that joins a run: whose node 0 cannot be reached, or has begun no attempt yet."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from infini_llama.configs.errors import PipelineError
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    append_attempt,
    attempt_plan_path,
)
from infini_llama.tasks.storage.locks import Lease
from infini_llama.tasks.train.nodes import POLL_SECONDS, join
from infini_llama.tasks.train.rendezvous import ENDPOINT, Endpoint
from support.records import make_lineage


@pytest.mark.timeout(60)
def test_join_ends_where_an_attempt_is_open_and_its_endpoint_does_not_answer(tmp_path):
    """As after the command on node 0 was killed, or behind a firewall."""
    attempt = tmp_path / "logs" / "attempt-01"
    attempt.mkdir(parents=True)
    attempt_plan_path(attempt).write_text("{}")
    endpoint = Endpoint(host="node-0", address="127.0.0.1", port=1)
    (attempt / ENDPOINT).write_text(endpoint.model_dump_json())
    with pytest.raises(PipelineError):
        join(RunFolder(tmp_path), timeout=1.5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("code", [0, 64])
def test_join_waits_for_a_supervisor_that_has_begun_no_attempt_yet(tmp_path, code):
    """The last attempt is one of an earlier command; node 0 verifies its checkpoint."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.write(run.lineage, make_lineage())
    append_attempt(run, AttemptRecord(attempt=1, kind="failed", code=code))
    with ThreadPoolExecutor(1) as threads, Lease(run.lease):
        joined = threads.submit(join, run)
        time.sleep(5 * POLL_SECONDS)
        assert not joined.done()
        run.lease.unlink()
        assert joined.result() == code
