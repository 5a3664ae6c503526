"""Where the nodes of an attempt find each other; that one is missing, or out of reach, is on record before any worker starts."""

import socket
import threading

import pytest

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.tasks.clusters import rendezvous
from infini_llama.tasks.clusters.node_records import claim, is_over, node_path, read_node
from support.records import make_plan

PLAN = make_plan(nnodes=2, master_addr="127.0.0.1")


class Stop(Exception):
    """Ends a wait."""


@pytest.fixture
def attempt_dir(tmp_path, monkeypatch):
    """With the places of both nodes taken."""
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.0)
    monkeypatch.setattr(rendezvous, "START_SECONDS", 0.0)
    folder = tmp_path / "runs" / "mine" / "logs" / "attempt-01"
    folder.mkdir(parents=True)
    assert claim(folder, 0, 2) == 0 and claim(folder, None, 2) == 1
    return folder


def nodes(attempt_dir) -> rendezvous.Nodes:
    found = rendezvous.Nodes()
    found.attempt_dir = attempt_dir
    return found


def test_the_other_nodes_find_the_first_where_it_listens(attempt_dir):
    first = rendezvous.host(attempt_dir, PLAN)
    with socket.create_server(("127.0.0.1", int(first.port))):
        other = rendezvous.reach(attempt_dir, 1, PLAN, lambda: None)
    assert (other.master_addr, other.port) == (first.master_addr, first.port) == ("127.0.0.1", first.port)
    for node, plan in enumerate((first, other)):
        options = rendezvous.torchrun_options(attempt_dir, node, plan, 60.0)
        assert f"--rdzv-endpoint=127.0.0.1:{first.port}" in options and "--nnodes=2" in options
        assert f"--rdzv-conf=is_host={int(node == 0)},join_timeout=60" in options


def test_ranks_are_given_to_static_nodes_by_their_numbers(attempt_dir):
    plan = make_plan(nnodes=2, rendezvous="static", master_addr="127.0.0.1", port=7)
    options = rendezvous.torchrun_options(attempt_dir, 1, plan, 60.0)
    assert "--node-rank=1" in options and "--master-port=7" in options and "--rdzv-conf=timeout=60" in options


def test_settings_of_a_node_override_those_of_the_first(attempt_dir):
    rendezvous.host(attempt_dir, PLAN)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        port = elsewhere.getsockname()[1]
        found = rendezvous.reach(attempt_dir, 1, PLAN.model_copy(update={"port": port}), lambda: None)
    assert found.port == port


def test_a_port_in_use_may_be_free_the_next_time(attempt_dir):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PipelineError, match=rf"environment\.port={port}") as refused:
            rendezvous.host(attempt_dir, PLAN.model_copy(update={"port": port}))
    assert refused.value.exit_code == PipelineError.exit_code


def test_a_machine_without_an_address_requires_one(attempt_dir, monkeypatch):
    monkeypatch.setattr(rendezvous, "own_address", lambda: None)
    with pytest.raises(ConfigError, match=r"environment\.master_addr"):
        rendezvous.host(attempt_dir, make_plan(nnodes=2))


def test_a_node_that_does_not_reach_the_first_is_named_until_it_does(attempt_dir):
    first = rendezvous.host(attempt_dir, PLAN)
    waiting, looks = rendezvous.WaitingForNodes(attempt_dir, 2), iter(range(3))

    def stop() -> None:
        if next(looks) == 2:
            raise Stop

    with pytest.raises(Stop):
        rendezvous.reach(attempt_dir, 1, PLAN, stop)
    waiting.poll(started=False)
    (sentence,) = nodes(attempt_dir).notices()
    assert "Node 1 (" in sentence and f"127.0.0.1:{first.port}: Connection refused" in sentence
    refusal = nodes(attempt_dir).refusal()
    assert type(refusal) is PipelineError and sentence in str(refusal), "it may work the next time"
    with socket.create_server(("127.0.0.1", int(first.port))):
        rendezvous.reach(attempt_dir, 1, PLAN, lambda: None)
    waiting.poll(started=False)
    assert nodes(attempt_dir).notices() == [] and nodes(attempt_dir).refusal() is None


def test_a_missing_node_is_named_with_the_command_to_start(attempt_dir):
    node_path(attempt_dir, 1).unlink()
    waiting = rendezvous.WaitingForNodes(attempt_dir, 2)
    waiting.poll(started=False)
    assert f"infini-llama join {attempt_dir.parents[1]}" in nodes(attempt_dir).notices()[0]
    waiting.poll(started=True)
    assert nodes(attempt_dir).notices() == []


def test_nodes_that_arrive_within_seconds_cause_no_warning(attempt_dir, monkeypatch):
    monkeypatch.setattr(rendezvous, "PATIENCE", 60.0)
    node_path(attempt_dir, 1).unlink()
    rendezvous.WaitingForNodes(attempt_dir, 2).poll(started=False)
    assert nodes(attempt_dir).notices() == []


def test_a_node_waits_for_the_first_node(attempt_dir):
    found = []

    def wait() -> None:
        found.append(rendezvous.reach(attempt_dir, 1, PLAN, lambda: None))

    waiting = threading.Thread(target=wait)
    waiting.start()
    first = rendezvous.host(attempt_dir, PLAN)
    with socket.create_server(("127.0.0.1", int(first.port))):
        waiting.join(30)
    assert found[0].port == first.port
    record = read_node(attempt_dir, 0)
    assert record is not None and record.port == first.port and not is_over(attempt_dir)
