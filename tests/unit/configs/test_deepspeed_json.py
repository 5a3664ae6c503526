"""DeepSpeed's JSON and the run's keys: what both say agrees or is refused by name. Needs no DeepSpeed."""

import json

import pytest

from infini_llama.configs.deepspeed import (
    engine_settings,
    read_json,
    refuse_contradictions,
)
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import TrainingConfig

OF_THE_RUN = {
    "global_batch_size": 64,
    "micro_batch_size": 4,
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
}


def run(content: dict | str | None = None, **changes) -> TrainingConfig:
    settings = (
        {"parallel": "deepspeed", "deepspeed_config": content} | OF_THE_RUN | changes
    )
    return TrainingConfig(**settings)


def refused(content: dict, precision: str = "fp32", **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_contradictions(run(content, **changes), 4, precision, workers=4)
    return str(caught.value)


def test_without_a_json_file_the_keys_of_the_run_are_used():
    expected = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    }
    assert engine_settings(run(), 4, workers=4) == expected
    assert engine_settings(run(zero_stage=3), 4, workers=4)["zero_optimization"] == {
        "stage": 3
    }


def test_an_ordinary_json_file_is_accepted(tmp_path):
    """The one of the training guide, with what is often left to DeepSpeed's caller."""
    content = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "weight_decay": 0.01, "betas": "auto"},
        },
        "scheduler": "auto",
        "fp16": {"enabled": True, "loss_scale": "auto"},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
        },
    }
    (tmp_path / "zero.json").write_text(json.dumps(content))
    train = run(str(tmp_path / "zero.json"))
    refuse_contradictions(train, 4, "fp16", workers=4)
    made = engine_settings(train, 4, workers=4)
    assert made["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert made["gradient_accumulation_steps"] == 4
    assert not made.keys() & {
        "optimizer",
        "scheduler",
        "fp16",
        "bf16",
        "train_batch_size",
    }, "the run's own keys decide"
    assert (
        engine_settings(train, 2, workers=4)["train_micro_batch_size_per_gpu"] == 2
    ), "after an out-of-memory error"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"train_batch_size": 32},
            "train_batch_size=32, but train.global_batch_size is 64",
        ),
        (
            {"gradient_accumulation_steps": 1},
            "global batch / (micro-batch x workers) is 4",
        ),
        ({"gradient_clipping": 0.5}, "train.max_grad_norm is 1.0"),
        (
            {"optimizer": {"type": "Lamb"}},
            "optimizer.type='Lamb', but train.optimizer=adamw is 'AdamW'",
        ),
        (
            {"optimizer": {"params": {"lr": 1e-3}}},
            "optimizer.params.lr=0.001, but train.learning_rate is 0.0001",
        ),
        (
            {"optimizer": {"params": {"freeze_step": 9}}},
            "optimizer.params.freeze_step is not known",
        ),
        (
            {"fp16": {"enabled": True}},
            "fp16.enabled=True, but environment.precision=fp16 is False",
        ),
        (
            {"fp16": {"initial_scale_power": 8, "enabled": False}},
            "fp16.initial_scale_power",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type is not known"),
        (
            {"zero_optimization": {"stage": 0}},
            "zero_optimization.stage=0 is not 1, 2 or 3",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device is not known",
        ),
        ({"zero_optimization": 2}, "zero_optimization is not known"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled is not known"),
    ],
)
def test_conflicting_and_unknown_settings_are_named(content, sentence):
    assert sentence in refused(content)


def test_every_contradiction_is_on_its_own_line():
    text = refused({"train_batch_size": 1, "bf16": {"enabled": True}}, zero_stage=3)
    assert len(text.splitlines()) == 3
    assert "train.zero_stage is 3" in refused(
        {"zero_optimization": {"stage": 1}}, zero_stage=3
    )


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_json_that_is_not_an_object_is_refused(tmp_path, content):
    (tmp_path / "zero.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="JSON"):
        read_json(str(tmp_path / "zero.json"))
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read_json(str(tmp_path / "missing.json"))
