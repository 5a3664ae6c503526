"""Everything that the workers of one attempt are given."""

from pathlib import Path

from pydantic import Field

from infini_llama.configs.reading import JsonObject
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.secrets import masked, without_secrets
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.goodput import Goodput, StartTime
from infini_llama.tasks.records.lineage import Lineage, SampleRange
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.record import Record


class CurriculumStage(Record):
    """A row table of shorter rows; `until`: the first sample that is not taken from it."""

    chunks: str
    until: int


class JobStart(Record):
    """When an attempt started. from_step: of the checkpoint that it starts from."""

    started: StartTime
    from_step: int = 0


class TrainingJob(JobStart):
    """Written before an attempt starts its workers, into the attempt's folder.

    Attributes:
        config: as the user wrote it, with the contents of the file train.deepspeed_config. What an attempt resolves has a field of
            its own here.
        max_steps: resolved from train.max_steps, num_epochs or max_tokens.
        micro_batch_size: in force in this attempt.
        curriculum: the shorter rows that the run starts with, in order.
        source_weights: by source, where data.sources has weights.
        verify_on_read: check each shard's checksum when it is first opened.
        resume_from: checkpoint folder; None: start from step 0.
        init_from: Hugging Face folder with the first weights; None: random ones, or `resume_from`.
        skipped_samples: ranges that a rollback has left out.
        lineage: a copy, should lineage.json be damaged.
        goodput: of the attempts before this one.
        grace_period: seconds that workers may take to save and end.
    """

    run_dir: Path
    dataset: Path
    dataset_digest: str
    chunks: str
    curriculum: tuple[CurriculumStage, ...] = ()
    source_weights: dict[str, float] | None = None
    verify_on_read: bool = False
    resume_from: Path | None = None
    init_from: Path | None = None
    skipped_samples: tuple[SampleRange, ...] = ()
    lineage: Lineage | None = None
    config: PipelineConfig
    max_steps: int
    micro_batch_size: int
    model: LlamaConfig
    plan: EnvironmentPlan
    goodput: Goodput = Field(default_factory=Goodput)
    grace_period: float = 0.0

    def to_json(self) -> JsonObject:
        """As it may be written down: variables that may hold secrets are masked; workers have them in their environment."""
        plan = self.plan.model_copy(update={"env": masked(self.plan.env)})
        shown = self.model_copy(update={"config": without_secrets(self.config), "plan": plan})
        lineage = self.lineage.to_json() if self.lineage else None
        return shown.model_dump(mode="json", exclude={"config": {"deployment"}}) | {"lineage": lineage}

    def settings(self) -> JsonObject:
        """The configuration with the values that were resolved, for experiment trackers."""
        resolved = {
            "max_steps": self.max_steps,
            "micro_batch_size": self.micro_batch_size,
            "compile": self.plan.compile,
        }
        config = self.config.model_copy(update={"train": self.config.train.model_copy(update=resolved)})
        return config.model_dump(mode="json", exclude={"deployment"})
