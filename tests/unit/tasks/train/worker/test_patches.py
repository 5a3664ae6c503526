"""A worker applies what its order names, also where a person starts it."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("patches", [["rendezvous", "adam-weight-decay"], []])
def test_a_worker_started_by_hand_needs_the_rendezvous_patch_and_says_what_it_mended(tmp_path, patches):
    order = tmp_path / "order.json"
    plan = {"patches": patches, "threads": 1, "device": "none", "nnodes": 1}
    waits = {"communication_timeout": 60.0, "preflight_timeout": 60.0}
    order.write_text(
        json.dumps(
            {
                "plan": plan,
                "config": {"environment": waits},
                "began": {"wall": 0.0, "monotonic": 0.0, "machine": "?"},
                "spent": {},
            }
        )
    )
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-m", "infini_llama.tasks.train.worker", str(order)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    log = tmp_path / "rank-0.log"
    if patches:
        assert log.read_text().count("patched for this process: ") >= 2 and "weight_decay=None" in log.read_text()
        assert json.loads((tmp_path / "status-0.json").read_text())["state"] == "failed", "there is no device 'none'"
    else:
        assert "KeyError: 'RANK'" in ended.stderr and not log.exists()
