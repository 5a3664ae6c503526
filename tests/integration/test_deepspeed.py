"""DeepSpeed's ZeRO under this project's loop: the losses of DDP, checkpoints that any strategy reads, and resume to the bit."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.laboratory import BATCH, kill, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("deepspeed") is None,
        reason="compares with the engine itself: needs the extra, pip install infini-llama[deepspeed]",
    ),
]
STAGES = ("1", "2", "3")
DDP = "0"


@pytest.fixture(scope="module")
def found(tmp_path_factory, server) -> dict:
    """What two ranks found under every stage, and under DDP."""
    folder = tmp_path_factory.mktemp("zero")
    program = Path(__file__).parent / "exactness/zero.py"
    torchrun(server, 2, folder / "log", program, str(folder), ",".join((DDP, *STAGES)))
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("stage", STAGES)
def test_losses_and_gradient_norms_are_those_of_ddp(found, stage):
    for name in ("losses", "norms"):
        assert found[stage][name] == pytest.approx(found[DDP][name], rel=1e-5)
    assert found[stage]["bf16"] == pytest.approx(found[DDP]["losses"], rel=1e-2)
    assert found[stage]["bf16"] != pytest.approx(found[DDP]["losses"], rel=1e-6), (
        "it computed in fp32"
    )


@pytest.mark.parametrize("stage", STAGES)
def test_resumed_is_bitwise_uninterrupted(found, stage):
    assert found[stage]["resumed"] == found[stage]["uninterrupted"]


@pytest.mark.parametrize("stage", STAGES)
def test_updates_are_skipped_entirely_and_a_loss_scale_changes_nothing(found, stage):
    for message in ("a spike is left out", "infinity is left out", "then goes on"):
        assert found[stage][message], message
    assert found[stage]["scaled_hashes"] == found[stage]["uninterrupted"]


@pytest.mark.parametrize("stage", STAGES)
def test_the_wrapped_model_is_accessible(found, stage):
    assert found[stage]["whole"]
    assert found[stage]["plain"] == found[stage]["plain_is"]


def test_any_strategy_resumes_from_any_other(found):
    for stage in (DDP, *STAGES):
        for source in (DDP, *STAGES):
            assert found[f"{stage} from {source}"] == pytest.approx(
                found[DDP]["losses"][3:], rel=1e-5
            )


@pytest.mark.timeout(900)
def test_killed_and_run_again_is_bitwise_the_uninterrupted_run(lab, tmp_path):
    # Layers as small as these would stay whole by DeepSpeed's defaults.
    settings = {
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    (tmp_path / "zero.json").write_text(json.dumps(settings))
    overrides = (
        "train.parallel=deepspeed",
        f"train.deepspeed_config={tmp_path / 'zero.json'}",
        "train.max_steps=24",
        "environment.nproc_per_node=2",
        "model.attention=infini",
    )
    lab.finish("zero-calm", *overrides)
    started = lab.start("zero-killed", *overrides)
    lab.wait_for_step("zero-killed", 13, started)
    kill(
        json.loads(
            (lab.run_dir("zero-killed") / "logs/attempt-01/status-1.json").read_text()
        )["pid"]
    )
    assert started.wait() == 0, started.log.read_text()
    assert [attempt.from_step for attempt in lab.attempts("zero-killed")] == [0, 10]
    lab.assert_same("zero-killed", "zero-calm")
