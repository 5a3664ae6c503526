"""How long ranks may take to find each other, and what is left of that limit afterwards."""

from datetime import timedelta

from infini_llama.tasks.train.worker.strategies.ranks import preflight, preflight_timeout


def test_one_machine_has_at_least_the_timeout_of_the_training():
    assert preflight_timeout(600.0, nnodes=2) == preflight_timeout(6.0, nnodes=1) == 120.0
    assert preflight_timeout(600.0, nnodes=1) == 600.0


def test_the_store_is_left_with_the_time_out_of_the_training(monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    store = preflight(0, 1, 20.0, afterwards=61.0)
    assert store.timeout == timedelta(seconds=61)
