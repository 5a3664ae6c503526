"""Nodes train together only if they have the same code, versions, dataset and order; what differs is named on all of them."""

import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from infini_llama.configs.errors import ConfigError, DataError, PipelineError
from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.train.worker import preflight
from infini_llama.tasks.train.worker.preflight import (
    NodeFacts,
    code_digest,
    connect,
    differences,
    facts,
    preflight_seconds,
    refuse_absent_interface,
)
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from support.records import make_attempt, make_plan


def resolved_for(home: Path, reference: DatasetRef) -> AttemptPlan:
    return make_attempt(
        home / "runs" / "one", dataset=reference, plan=make_plan(nnodes=2)
    )


@pytest.fixture
def both(monkeypatch):
    """both(first, other): what the first ranks of two nodes so attempt raise."""

    def raised(attempt: AttemptPlan, store: HashStore) -> PipelineError | None:
        try:
            preflight.require_same_nodes(attempt, store)
        except PipelineError as error:
            return error

    def compare(first: AttemptPlan, other: AttemptPlan) -> list[PipelineError | None]:
        store = HashStore()
        with ThreadPoolExecutor(2) as pool:
            pending = []
            for node, attempt in enumerate((first, other)):
                monkeypatch.setenv("LOCAL_RANK", "0")
                monkeypatch.setenv("GROUP_RANK", str(node))
                pending.append(pool.submit(raised, attempt, store))
                while not store.check([f"facts-{node}"]):  # it has read its variables
                    pass
            # Another rank of the last node publishes nothing and raises the same.
            monkeypatch.setenv("LOCAL_RANK", "1")
            return [*(one.result(60) for one in pending), raised(other, store)]

    return compare


def test_consistent_nodes_start(built, both):
    attempt = resolved_for(*built)
    assert both(attempt, attempt) == [None, None, None]


def test_another_dataset_is_refused_with_the_node_and_both_values(
    built, data, tmp_path, both
):
    attempt = resolved_for(*built)
    unlike = resolved_for(
        tmp_path / "other",
        preprocess(data(validation_fraction=0.4), tmp_path / "other"),
    )
    errors = both(attempt, unlike)
    assert (
        all(isinstance(error, ConfigError) for error in errors)
        and len({str(error) for error in errors}) == 1
    )
    here, there = (facts(one)["dataset"] for one in (attempt, unlike))
    assert (
        here != there
        and f"has dataset {there}, but node 0" in str(errors[0])
        and "node 1 (" in str(errors[0])
    )
    assert "has order and tokens of the first rows" in str(errors[0])


def test_the_order_is_the_one_that_training_uses(built):
    """Another seed gives other rows, as in the trainer."""
    attempt = resolved_for(*built)
    train = changed(attempt.config.train, seed=attempt.config.train.seed + 1)
    reseeded = changed(attempt, config=changed(attempt.config, train=train))
    name = "order and tokens of the first rows"
    assert facts(attempt)[name] != facts(reseeded)[name]


def test_a_node_that_does_not_see_the_dataset_is_bad_data_on_all(built, both):
    home, reference = built
    elsewhere = home.with_name("unmounted")
    errors = both(resolved_for(home, reference), resolved_for(elsewhere, reference))
    assert all(isinstance(error, DataError) for error in errors)
    assert "node 1 (" in str(errors[0]) and str(elsewhere) in str(errors[0])


def test_versions_and_code_are_compared(tmp_path):
    first = NodeFacts(
        node=0, host="a", facts={"torch": "2.13.0", "code of infini-llama": "x"}
    )
    other = NodeFacts(
        node=3, host="b", facts={"torch": "2.12.1", "code of infini-llama": "x"}
    )
    assert differences(first, other) == [
        "node 3 (b) has torch 2.12.1, but node 0 (a) has 2.13.0."
    ]
    for package in preflight.PACKAGES:
        assert (preflight.ROOT / package).is_dir()
        shutil.copytree(
            preflight.ROOT / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    assert code_digest(tmp_path) == code_digest()
    with (tmp_path / "model" / "llama.py").open("a") as file:
        file.write("#")
    assert code_digest(tmp_path) != code_digest()


def test_one_machine_has_at_least_the_timeout_of_the_training():
    assert (
        preflight_seconds(600.0, nnodes=2) == preflight_seconds(6.0, nnodes=1) == 120.0
    )
    assert preflight_seconds(600.0, nnodes=1) == 600.0


def test_the_store_has_the_timeout_of_the_training_afterwards(monkeypatch):
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
    }.items():
        monkeypatch.setenv(name, str(value))
    store = connect(0, 1, 20.0)
    ranks = Ranks("cpu", "gloo", 61.0, store)
    assert store.timeout == timedelta(seconds=61)
    ranks.leave()


def test_an_interface_that_is_absent_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", socket.if_nameindex()[0][1])
    refuse_absent_interface()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{socket.if_nameindex()[0][1]},nosuch0")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME"):
        refuse_absent_interface()
