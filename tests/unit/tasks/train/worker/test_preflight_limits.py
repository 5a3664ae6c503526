"""How long ranks may take to find each other, and what is left of that limit afterwards."""

from datetime import timedelta

from infini_llama.configs.schema import EnvironmentConfig
from infini_llama.tasks.train.worker.strategies.preflight import preflight, preflight_timeout


def test_several_machines_have_the_time_that_is_set_and_one_at_least_that_of_the_training():
    short = EnvironmentConfig(preflight_timeout=120.0, communication_timeout=600.0)
    assert preflight_timeout(short, nnodes=2) == 120.0
    assert preflight_timeout(short, nnodes=1) == 600.0
    long = EnvironmentConfig(preflight_timeout=900.0, communication_timeout=600.0)
    assert preflight_timeout(long, nnodes=1) == 900.0


def test_the_store_is_left_with_the_time_out_of_the_training(monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    store = preflight(0, 1, 20.0, afterwards=61.0)
    assert store.timeout == timedelta(seconds=61)
