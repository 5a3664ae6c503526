"""Records with the fields that a test does not care about filled in."""

from pathlib import Path
from typing import Any

from infini_llama.configs.schema import DataConfig, PipelineConfig, TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.goodput import StartTime
from infini_llama.tasks.records.job import TrainingJob
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.train.run_context import RunContext

SPLIT = {"documents": 0, "tokens": 0, "bytes": 0, "unigram_entropy_bits": 4.0, "rows": 100}


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
    return EnvironmentPlan.from_json(fields | changes)


def make_dataset(**changes: Any) -> DatasetRef:
    """A dataset of 100 training rows of 16 tokens that is not on disk."""
    fields: dict[str, Any] = dict.fromkeys(("path", "digest", "chunks", "chunks_digest"), "same")
    fields |= {"sequence_length": 16, "vocab_size": 61, "train": SPLIT, "validation": SPLIT}
    return DatasetRef.from_json(fields | changes)


def make_model(config: PipelineConfig, dataset: DatasetRef) -> LlamaConfig:
    """The architecture of a run."""
    return LlamaConfig.from_dict(config.model.architecture(dataset.vocab_size, dataset.sequence_length))


def make_job(run_dir: Path, **changes: Any) -> TrainingJob:
    """What the workers of an attempt are given; its dataset is not on disk, unless `changes` name one."""
    plan, train = changes.get("plan") or make_plan(), TrainingConfig(micro_batch_size=8, compile="off")
    fields: dict[str, Any] = {
        "started": StartTime(wall=1.0, machine="another"),
        "run_dir": run_dir,
        "dataset": run_dir,
        "dataset_digest": "",
        "chunks": "",
        "sequence_length": 16,
        "config": PipelineConfig(data=DataConfig(source="python-stdlib"), train=train),
        "max_steps": 16,
        "micro_batch_size": plan.micro_batch_size,
        "model": LlamaConfig(61, 16, 32, 1, 2, 1, 16),
        "plan": plan,
        "grace_period": 1.0,
    }
    return TrainingJob(**(fields | changes))


def make_context(run: RunFolder, config: PipelineConfig, **changes: Any) -> RunContext:
    """What an attempt at `run` works with; its settings are those of the configuration."""
    dataset = changes.get("dataset") or make_dataset()
    fields: dict[str, Any] = {
        "model": make_model(config, dataset),
        "train": config.train,
        "dataset": dataset,
        "plan": make_plan(),
        "curriculum": (),
        "verify_on_read": False,
        "invocation": "mine",
        "locks": (),
        "each_poll": lambda: None,
    } | changes
    return RunContext(run=run, config=config, **fields)
