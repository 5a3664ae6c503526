"""Nodes start together or not at all, and it is said why."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError, DataError, PipelineError
from infini_llama.tasks.clusters import node_records as records
from infini_llama.tasks.clusters import rendezvous as meeting
from infini_llama.tasks.clusters.consistency import code_digest, differences
from support.stages import preprocess


def refusal(attempt_dir: Path) -> PipelineError | None:
    nodes = meeting.Nodes()
    nodes.attempt_dir = attempt_dir
    return nodes.refusal()


REQUESTED = {"nnodes": 2, "master_addr": "127.0.0.1", "port": "auto"}


def order_for(home: Path, reference: dict, join_timeout: float = 60.0) -> dict:
    return {
        "dataset": str(home / reference["path"]),
        "chunks": reference["chunks"],
        "weights": None,
        "plan": {"rendezvous": "c10d"},
        "config": {
            "environment": {"join_timeout": join_timeout},
            "data": {"curriculum": []},
            "train": {"seed": 1, "global_batch_size": 8},
        },
    }


@pytest.fixture
def attempt_dir(tmp_path):
    """With the places of both nodes taken."""
    folder = tmp_path / "runs" / "mine" / "logs" / "attempt-01"
    folder.mkdir(parents=True)
    assert records.claim(folder, 0, 2) == 0 and records.claim(folder, None, 2) == 1
    return folder


def both(attempt_dir: Path, first: dict, other: dict, wishes_of_other: dict = REQUESTED) -> tuple:
    """What the two nodes' meeting ends with, a place or an exception each."""
    stop = threading.Event()

    def poll() -> None:
        if stop.is_set():
            raise TimeoutError

    def part(meet, *arguments):
        try:
            return meet(*arguments, poll)
        except PipelineError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        led = pool.submit(part, meeting.gather, attempt_dir, first, REQUESTED)
        joined = pool.submit(part, meeting.meet, attempt_dir, other, wishes_of_other, 1)
        try:
            return led.result(90), joined.result(90)
        finally:
            stop.set()


def test_nodes_that_are_the_same_start_at_one_place(attempt_dir, built):
    order = order_for(*built)
    first, other = both(attempt_dir, order, order)
    assert (first.node, other.node, first.nnodes) == (0, 1, 2)
    assert (first.address, first.port) == (other.address, other.port) and first.port > 0
    assert records.word(attempt_dir)["state"] == "go" and refusal(attempt_dir) is None
    assert f"--rdzv-endpoint=127.0.0.1:{first.port}" in other.torchrun()
    assert "--rdzv-conf=is_host=1" in first.torchrun() and "--rdzv-conf=is_host=0" in other.torchrun()


def test_another_dataset_is_refused_with_the_node_and_both_values(attempt_dir, built, data, tmp_path):
    order = order_for(*built)
    unlike = order_for(tmp_path / "other", preprocess(data(validation_fraction=0.4), str(tmp_path / "other")))
    first, other = both(attempt_dir, order, unlike)
    assert isinstance(first, ConfigError) and str(first) == str(other) == str(refusal(attempt_dir))
    here, there = (records.read(records.node_path(attempt_dir, node))["facts"]["dataset"] for node in (0, 1))
    assert here != there and f"has dataset {there}, but node 0" in str(first) and "node 1 (" in str(first)
    assert "has order and tokens of the first rows" in str(first)


def test_a_node_that_does_not_see_the_dataset_ends_the_attempt_as_bad_data(attempt_dir, built):
    home, reference = built
    elsewhere = home.with_name("unmounted")
    first, other = both(attempt_dir, order_for(home, reference), order_for(elsewhere, reference))
    assert isinstance(first, DataError) and isinstance(other, DataError)
    assert "node 1 (" in str(first) and str(elsewhere) in str(first)


def test_a_node_that_cannot_reach_the_first_is_named_with_what_to_open(attempt_dir, built, monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", 0.5)
    order = order_for(*built, join_timeout=3.0)
    first, other = both(attempt_dir, order, order, REQUESTED | {"port": 9})
    assert type(first) is type(other) is PipelineError, "it may work the next time"
    assert "after 3 s (environment.join_timeout): Node 1 (" in str(first)
    assert "at 127.0.0.1:9: Connection refused; allow TCP" in str(first)


def test_a_node_that_does_not_come_is_named_with_the_command_to_start(attempt_dir, built):
    records.node_path(attempt_dir, 1).unlink()
    with pytest.raises(
        PipelineError, match=r"Node 1 of 2 has not joined; start `infini-llama join .*/mine` on each other"
    ):
        meeting.gather(attempt_dir, order_for(*built, join_timeout=0.5), REQUESTED, lambda: None)
    assert refusal(attempt_dir).exit_code == PipelineError.exit_code


def test_versions_and_code_are_compared(tmp_path):
    first = {"node": 0, "host": "a", "facts": {"torch": "2.13.0", "code of infini-llama": "x"}}
    other = {"node": 3, "host": "b", "facts": {"torch": "2.12.1", "code of infini-llama": "x"}}
    assert differences(first, other) == ["node 3 (b) has torch 2.12.1, but node 0 (a) has 2.13.0."]
    root = Path(meeting.__file__).parents[2]
    for package in ("configs", "model", "tasks"):
        shutil.copytree(root / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    assert code_digest(tmp_path) == code_digest()
    with (tmp_path / "model" / "llama.py").open("a") as file:
        file.write("#")
    assert code_digest(tmp_path) != code_digest()


def test_ended_nodes_are_not_waited_for(attempt_dir):
    for node in (0, 1):
        records.update(attempt_dir, node, state="ended")
    meeting.end_nodes(attempt_dir)
    assert records.word(attempt_dir)["state"] == "over"
