"""What several nodes change in a plan."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.planning.compare import differences
from infini_llama.tasks.patch_environment.planning.plan import resolve
from infini_llama.tasks.patch_environment.probe.probe import probe
from support.machines import changed


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return changed(probe(tmp_path_factory.mktemp("home")), {"cores": 8, "gpus": [], "nccl": False, "loopback": "lo"})


def config(**environment) -> PipelineConfig:
    sections = {"data": {"source": "python-stdlib"}, "environment": environment}
    return PipelineConfig.model_validate(sections)


def test_gloo_is_kept_to_the_loopback_on_one_machine_alone(facts):
    assert resolve(config(nproc_per_node=2), facts).env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in resolve(config(nnodes=2, nproc_per_node=2), facts).env


def test_the_same_ranks_on_other_machines_lose_nothing(facts):
    def lost(then: dict, now: dict) -> list[str]:
        plans = [resolve(config(**settings), facts) for settings in (then, now)]
        return [one.name for one in differences(plans[0].pinned(), facts, plans[1], facts) if one.exactness == "lost"]

    assert lost({"nproc_per_node": 4, "threads": 1}, {"nnodes": 2, "nproc_per_node": 2, "threads": 1}) == []
    assert lost({"nproc_per_node": 2, "threads": 1}, {"nnodes": 2, "nproc_per_node": 2, "threads": 1}) == ["nnodes"]


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
