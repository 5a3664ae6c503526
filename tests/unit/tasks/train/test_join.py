"""A node that joins a run whose node 0 cannot be reached."""

import pytest

from infini_llama.configs.errors import PipelineError
from infini_llama.tasks.runs.run_folder import RunFolder, attempt_plan_path
from infini_llama.tasks.train.nodes import join
from infini_llama.tasks.train.rendezvous import ENDPOINT, Endpoint


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
