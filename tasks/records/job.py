"""Everything that the workers of one attempt are given."""

from pathlib import Path

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
    """Written before an attempt starts its workers, as job.json in the attempt's folder.

    Attributes:
        config: as the user wrote it; values of environment.env are masked.
        max_steps: resolved from train.max_steps, num_epochs or max_tokens.
        micro_batch_size: in force in this attempt.
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
    deepspeed_config: dict[str, object] = Field(default_factory=dict)
    model: LlamaConfig
    plan: EnvironmentPlan
    started: StartTime
    goodput: Goodput
    from_step: int
    grace_period: float
