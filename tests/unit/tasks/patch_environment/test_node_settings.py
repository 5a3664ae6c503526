"""A plan for nodes that are another kind of machine than the one that makes it."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.patch_environment.stage import patch_environment
from infini_llama.tasks.records.plan import EnvironmentPlan
from support.machines import in_home, settings

SLURM = {"launcher": "slurm", "nproc_per_node": "auto"}


def plan(tmp_path, **environment) -> EnvironmentPlan:
    train = {"global_batch_size": 64, "micro_batch_size": 2}
    return patch_environment(in_home(settings(SLURM | environment, train), tmp_path), "run").plan


def test_gpus_that_are_not_here_are_planned_for_where_a_job_trains_on_them(tmp_path):
    made = plan(tmp_path, node={"gpus": 8, "cores": 96, "gpu_memory": "80GiB"}, nnodes=2)
    assert made.device == "cuda" and made.nproc_per_node == 8 and made.precision == "bf16"
    assert made.distributed_backend == "nccl" and made.threads == 12
    assert "CUDA_VISIBLE_DEVICES" not in made.env


def test_old_gpus_have_no_bf16(tmp_path):
    assert plan(tmp_path, node={"gpus": 1, "gpu_capability": "7.5"}).precision == "fp32"


def test_an_equal_machine_needs_no_warning(tmp_path):
    assert plan(tmp_path).device == "cpu"


def test_gpus_that_nobody_has_spoken_of_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"environment\.device=cuda"):
        plan(tmp_path, device="cuda")
