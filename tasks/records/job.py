"""Everything that the workers of one attempt are given."""

from pathlib import Path
from typing import Any

from pydantic import Field

from infini_llama.configs.loading import parse_config
from infini_llama.configs.reading import JsonObject
from infini_llama.configs.schema import PipelineConfig, TrainingConfig
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
    """What is read of an attempt's job later, whichever version wrote it.

    Attributes:
        from_step: of the checkpoint that the attempt starts from.
    """

    started: StartTime
    from_step: int = 0

    @classmethod
    def upgrade(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Of an older version, whose `started` was `began`."""
        return fields | {"started": fields["began"]} if "began" in fields else fields


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
        lineage: a copy, should lineage.json be damaged; None: of an older version.
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

    @classmethod
    def upgrade(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """From order.json, whose `config` has resolved values and the curriculum in samples."""
        if "began" not in fields:
            return fields
        config = fields["config"]
        data, train = config["data"], config["train"]
        resolved = {name: train[name] for name in ("max_steps", "micro_batch_size")}
        return super().upgrade(fields) | {
            **resolved,
            "curriculum": data["curriculum"],
            "source_weights": fields["weights"],
            "skipped_samples": fields["left_out"],
            "lineage": Lineage.upgrade(fields["lineage"]) if "lineage" in fields else None,
            "config": parse_config(config | {"data": data | {"curriculum": []}}),
            "goodput": fields["spent"],
        }

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


class StepTrial(Record):
    """Steps on random tokens that patch-environment times.

    Attributes:
        sequence_length: tokens of a sequence.
        seconds: to spend on steps after the first.
    """

    train: TrainingConfig
    plan: EnvironmentPlan
    model: LlamaConfig
    sequence_length: int
    seconds: float

    @property
    def micro_batches(self) -> int:
        """Of a step: two where the run's have several, so that what is done once per step has a part in the time."""
        return min(2, self.plan.accumulation_steps)


class StepTrialResult(Record):
    """Seconds of the first step, and the median of the other `steps`."""

    first: float
    step: float
    steps: int
