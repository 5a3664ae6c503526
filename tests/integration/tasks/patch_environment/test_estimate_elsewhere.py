"""The estimate for a machine that is not here."""

import pytest
import torch

from infini_llama.configs.loading import parse_config
from infini_llama.tasks.estimate.run import plan_of
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from support.machines import H100, lay_out


@pytest.mark.skipif(torch.cuda.is_available(), reason="it runs here")
def test_the_micro_batch_of_a_machine_that_is_not_here_is_the_one_it_would_choose(
    tmp_path,
):
    machine = lay_out(tmp_path, gpus=[H100] * 8)
    config = parse_config(
        {
            "data": {"source": "python-stdlib"},
            "train": {"global_batch_size": 256},
            "environment": {"device": "cuda", "nproc_per_node": 8},
            "runtime": {"home": str(tmp_path / "home")},
        }
    )
    there = plan_environment(config, probe(tmp_path / "home", machine=machine))
    assert plan_of(config, None).micro_batch_size == there.micro_batch_size > 1
