"""Settings of several nodes that contradict each other."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        (
            {"nnodes": 2, "node_rank": 2},
            ["environment.node_rank=2, but environment.nnodes=2 and they count from 0; use auto or at most 1"],
        ),
        (
            {"launcher": "srun", "srun_options": ["--nodes=2"]},
            ["environment.srun_options: it contains --nodes=2, which the launcher sets itself; remove it"],
        ),
        (
            {"srun_options": ["--time=1"]},
            ["srun_options is set, but launcher is not srun; set environment.launcher=srun or remove the options"],
        ),
        (
            {"master_addr": "10.0.0.1"},
            ["environment.master_addr=10.0.0.1, but environment.nnodes=1 has no other node; use auto, or set nnodes"],
        ),
        (
            {"master_addr": "a b", "nnodes": 2},
            ["environment.master_addr: 'a b' is not a host name, an IPv4 address or auto"],
        ),
        (
            {"nnodes": 3, "nproc_per_node": 2},
            [
                "train.global_batch_size=32 is not a multiple of train.micro_batch_size=8 x environment.nproc_per_node=2 x "
                "environment.nnodes=3; change one of them"
            ],
        ),
    ],
)
def test_all_impossible_settings_are_reported_at_once(environment, lines):
    with pytest.raises(ConfigError) as raised:
        parse_config({"data": {"source": "python-stdlib"}, "environment": environment})
    assert all(line in str(raised.value) for line in lines)
    assert str(raised.value).count("environment.") >= len(lines)


def test_supported_settings_are_accepted():
    for settings in (
        {"nnodes": 2},
        {"nnodes": 2, "master_addr": "node-0.cluster", "master_port": 29500},
        {"nnodes": 2, "launcher": "srun", "srun_options": ["--partition=gpu", "--exclusive"]},
    ):
        parse_config({"data": {"source": "python-stdlib"}, "environment": settings})
