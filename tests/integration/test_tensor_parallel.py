"""Ranks that share models have the losses, gradients and norms of one process on the whole batch, under every strategy (fp64)."""

import json
from pathlib import Path

import pytest

from support.laboratory import exact_metrics, found_by_ranks, kill


@pytest.mark.parametrize(("which", "cells"), [("some", 5), pytest.param("all", 45, marks=pytest.mark.slow)])
def test_four_ranks_compute_what_one_does(tmp_path, which, cells):
    target = tmp_path / "found.json"
    found = found_by_ranks(4, target, Path(__file__).parent / "exactness/tensor.py", str(target), which)
    assert found.pop("drifted") == 0, "what several ranks hold has to stay the same on all"
    assert found.pop("survives"), "a checkpoint holds the same tensors in every layout"
    assert len(found) == cells
    limits = {"loss": 1e-6}  # it is summed in fp32
    too_far = {
        cell: values
        for cell, values in found.items()
        if not all(value < limits.get(key, 1e-12) for key, value in values.items())
    }
    assert not too_far


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_run_again_is_bitwise_the_uninterrupted_run(lab):
    overrides = ("train.tensor_parallel=2", "train.parallel=fsdp", "environment.nproc_per_node=4", "train.max_steps=24")
    overrides += ("model.attention=infini", "model.hidden_dropout=0.1", "train.sample_at_evaluation=true")
    calm = lab.finish("shared-calm", *overrides)
    started = lab.start("shared-killed", *overrides)
    lab.wait_for_step("shared-killed", 13, started)
    kill(json.loads((lab.run_dir("shared-killed") / "logs/attempt-01/status-3.json").read_text())["pid"])
    assert started.wait() == 0, started.log.read_text()
    killed = json.loads((lab.run_dir("shared-killed") / "summary.json").read_text())
    attempts = (lab.run_dir("shared-killed") / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["from_step"] for line in attempts] == [0, 10]
    for name in ("weights_sha256", "optimizer_sha256", "samples"):
        assert killed[name] == calm[name], name
    assert exact_metrics(lab.run_dir("shared-killed")) == exact_metrics(lab.run_dir("shared-calm"))
    assert len((lab.run_dir("shared-killed") / "samples.jsonl").read_text().splitlines()) == 1
