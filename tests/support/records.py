"""Records with the fields that a test does not care about filled in."""

from pathlib import Path
from typing import Any

from infini_llama.configs.reading import changed
from infini_llama.configs.schema import (
    DataConfig,
    ModelConfig,
    PipelineConfig,
    TrainingConfig,
)
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.export.card import ModelFacts
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.lineage import Lineage, LineageDataset
from infini_llama.tasks.records.metrics import StartTime
from infini_llama.tasks.records.plan import EnvironmentPlan

SPLIT = {
    "documents": 0,
    "tokens": 0,
    "bytes": 0,
    "unigram_entropy_bits": 4.0,
    "rows": 100,
}


def make_plan(**changes: Any) -> EnvironmentPlan:
    """One worker on a CPU."""
    fields: dict[str, Any] = {
        "device": "cpu",
        "gpus": [],
        "nproc_per_node": 1,
        "precision": "fp32",
        "attention_backend": "sdpa",
        "threads": 1,
        "distributed_backend": "gloo",
        "micro_batch_size": 2,
    }
    return EnvironmentPlan.model_validate(fields | changes)


def make_dataset(**changes: Any) -> DatasetRef:
    """A dataset of 100 training rows of 16 tokens that is not on disk."""
    fields: dict[str, Any] = dict.fromkeys(
        ("path", "digest", "row_table", "row_table_digest"), "same"
    )
    fields |= {
        "sequence_length": 16,
        "vocab_size": 61,
        "train": SPLIT,
        "validation": SPLIT,
    }
    return DatasetRef.model_validate(fields | changes)


def make_config() -> PipelineConfig:
    """16 steps of a model of one layer."""
    train = TrainingConfig(
        micro_batch_size=8, compile="off", max_steps=16, warmup_steps=1
    )
    sizes = ModelConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return PipelineConfig(
        data=DataConfig(source="python-stdlib"), train=train, model=sizes
    )


def make_lineage(
    config: PipelineConfig | None = None,
    dataset: DatasetRef | None = None,
    **changes: Any,
) -> Lineage:
    """What a run of this configuration is bound to, without a curriculum."""
    config, dataset = config or make_config(), dataset or make_dataset()
    bound = {
        name: getattr(dataset, name)
        for name in (
            "path",
            "digest",
            "row_table",
            "row_table_digest",
            "sequence_length",
        )
    }
    fields: dict[str, Any] = {
        "dataset": LineageDataset(**bound),
        "model": LlamaConfig(
            **config.model.architecture(dataset.vocab_size, dataset.sequence_length)
        ),
        "train": config.train,
        "max_steps": config.train.max_steps or 16,
    }
    return Lineage(**(fields | changes))


def make_attempt(
    run_dir: Path, config: PipelineConfig | None = None, **changes: Any
) -> AttemptPlan:
    """An attempt at a run in `run_dir`; its dataset is not on disk, unless `changes` name one."""
    config, dataset = config or make_config(), changes.get("dataset") or make_dataset()
    fields: dict[str, Any] = {
        "started": StartTime(wall=1.0, monotonic=0.0, machine="another"),
        "run_dir": run_dir,
        "config": config,
        "dataset": dataset,
        "plan": make_plan(),
        "lineage": changes.get("lineage") or make_lineage(config, dataset),
        "invocation": "mine",
    }
    return AttemptPlan(**(fields | changes))


def make_model_facts(**changes: Any) -> ModelFacts:
    facts = ModelFacts(
        run="one",
        step=1,
        tokens=1,
        parameters=1,
        validation_loss=None,
        bits_per_byte=None,
        dataset="d",
        dataset_digest="d",
        sequence_length=8,
        vocabulary=8,
        weights_sha256="0",
        infini_llama="1",
        sample_prompt="",
        split_special_tokens=True,
        pad_token=None,
        global_batch_size=1,
        learning_rate=0.1,
        seed=0,
    )
    return changed(facts, **changes)
