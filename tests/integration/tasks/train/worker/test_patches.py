"""A worker applies what its order names, also where a person starts it."""

import json
import os
import subprocess
import sys

import pytest

from infini_llama.configs.schema import DataConfig, PipelineConfig, TrainingConfig
from infini_llama.model.config import LlamaConfig
from support.one_rank import PLAN, timing


@pytest.mark.parametrize("patches", [["rendezvous", "adam-weight-decay"], []])
def test_a_worker_started_by_hand_needs_the_rendezvous_patch_and_says_what_it_mended(tmp_path, patches):
    order = tmp_path / "order.json"
    plan = PLAN | {"patches": patches, "distributed_backend": "none"}
    config = PipelineConfig(
        data=DataConfig(source="python-stdlib"), train=TrainingConfig(micro_batch_size=8, compile="off")
    ).model_dump(mode="json")
    model = LlamaConfig(61, 16, 32, 1, 2, 1, 16).to_dict()
    fields = {"plan": plan, "config": config, "model": model, "run_dir": str(tmp_path), "dataset": str(tmp_path)}
    fields |= {"dataset_digest": "", "chunks": "", "sequence_length": 16, "weights": None, "left_out": []}
    order.write_text(json.dumps(fields | timing()))
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-m", "infini_llama.tasks.train.worker", str(order)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    log = tmp_path / "rank-0.log"
    if patches:
        assert log.read_text().count(" to this process (") >= 2 and "weight_decay=None" in log.read_text()
        assert json.loads((tmp_path / "status-0.json").read_text())["state"] == "failed", "there is no backend 'none'"
    else:
        assert "KeyError: 'RANK'" in ended.stderr and not log.exists()
