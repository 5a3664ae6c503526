"""Everything that the workers of one attempt are given."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from infini_llama.configs.schema import PipelineConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.goodput import Goodput, StartTime
from infini_llama.tasks.records.lineage import SampleRange
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.record import Record


class CurriculumStage(Record):
    """A row table of shorter rows; `until`: the first sample that is not taken from it."""

    chunks: str
    until: int


class TrainingJob(Record):
    """Written before an attempt starts its workers, into the attempt's folder.

    Attributes:
        config: as the user wrote it; values of environment.env are masked. What an attempt resolves has a field of its own here.
        max_steps: resolved from train.max_steps, num_epochs or max_tokens.
        micro_batch_size: in force in this attempt.
        compile: resolved from train.compile.
        curriculum: the shorter rows that the run starts with, in order.
        source_weights: by source, where data.sources has weights.
        verify_on_read: check each shard's checksum when it is first opened.
        resume_from: checkpoint folder; None: start from step 0.
        init_from: Hugging Face folder with the first weights; None: random ones, or `resume_from`.
        skipped_samples: ranges that a rollback has left out.
        plan: values of `env` are masked; the workers have the real ones in their environment.
        goodput: of the attempts before this one.
        grace_period: seconds that workers may take to save and end.
    """

    run_dir: Path
    dataset: Path
    dataset_digest: str
    chunks: str
    sequence_length: int
    curriculum: tuple[CurriculumStage, ...] = ()
    source_weights: dict[str, float] | None = None
    verify_on_read: bool = False
    resume_from: Path | None = None
    init_from: Path | None = None
    skipped_samples: tuple[SampleRange, ...] = ()
    config: PipelineConfig
    max_steps: int
    micro_batch_size: int
    compile: Literal["off", "block", "whole"] = "off"
    model: LlamaConfig
    plan: EnvironmentPlan
    started: StartTime
    goodput: Goodput = Field(default_factory=Goodput)
    from_step: int = 0
    grace_period: float = 0.0

    @classmethod
    def upgrade(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """From order.json, whose `config` has resolved values and the curriculum in samples."""
        if "began" not in fields:
            return fields
        config = fields["config"]
        train = config["train"]
        return fields | {
            "curriculum": config["data"]["curriculum"],
            "source_weights": fields["weights"],
            "skipped_samples": fields["left_out"],
            "config": config | {"data": config["data"] | {"curriculum": []}},
            "max_steps": train["max_steps"],
            "micro_batch_size": train["micro_batch_size"],
            "compile": train["compile"],
            "started": fields["began"],
            "goodput": fields["spent"],
        }
