"""What a run is bound to, and what its training changed since."""

from typing import Any

from pydantic import Field, PositiveInt, field_validator

from infini_llama.tasks.records.record import Record


class SampleRange(Record):
    """Samples first … end-1."""

    first: int
    end: int


class LineageStage(Record):
    """A stage of data.curriculum, and the digest of its row table."""

    sequence_length: int
    until_step: int | None = None
    until_fraction: float | None = None
    chunks_digest: str


class LineageDataset(Record):
    """The dataset of a run and the order of its samples.

    Attributes:
        chunks_digest: of the row table chunks/<chunks>.
        weights: of each source, where data.sources has weights.
        curriculum: stages of other row lengths.
    """

    path: str
    digest: str
    chunks: str
    chunks_digest: str | None = None
    sequence_length: int
    weights: dict[str, float] | None = None
    curriculum: tuple[LineageStage, ...] | None = None


class InitialWeights(Record):
    """The Hugging Face folder that a run starts from. digest: of its configuration and weights."""

    path: str
    digest: str
    vocab_size: int


class TrainSettings(Record):
    """What later commands read of `Lineage.train`."""

    max_steps: int = 0
    seed: int | None = None
    global_batch_size: int | None = None
    learning_rate: float | None = None
    sample_prompt: str = ""
    eval_sequences: int | None = None
    document_masking: bool = False
    save_permanent_every: int | None = None


class Lineage(Record):
    """Written as lineage.json when a run starts, and again when training changes it.

    Attributes:
        model: fields of LlamaConfig, by name.
        train: settings of section `train`, by name, as the last command resolved them.
        curriculum_ends: last step of each stage of data.curriculum.
        skipped_samples: ranges that rollbacks have left out.
        micro_batch_size: after an out-of-memory error; None: the plan's.
        resumed_from: the checkpoint that runtime.resume named.
    """

    json_without = "unset"

    dataset: LineageDataset
    model: dict[str, Any]
    train: dict[str, Any]
    init_from: InitialWeights | None = None
    curriculum_ends: tuple[int, ...] | None = None
    skipped_samples: tuple[SampleRange, ...] = Field(default=())
    micro_batch_size: PositiveInt | None = None
    resumed_from: str | None = None

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.settings.max_steps

    @property
    def settings(self) -> TrainSettings:
        """Some of `train`, typed."""
        return TrainSettings.model_validate(self.train)

    @field_validator("train")
    @classmethod
    def _has_valid_settings(cls, train: dict[str, Any]) -> dict[str, Any]:
        TrainSettings.model_validate(train)
        return train
