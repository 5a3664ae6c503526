"""What tests of one rank stand on."""

import pytest

from infini_llama.tasks.train.worker.strategies.ranks import Ranks


@pytest.fixture
def ranks(monkeypatch):
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }.items():
        monkeypatch.setenv(name, str(value))
    ranks = Ranks("cpu", "gloo")
    yield ranks
    ranks.leave()
