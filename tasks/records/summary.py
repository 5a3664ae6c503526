"""The results of a run: while it runs, when it has finished, and beside other runs."""

from pathlib import Path

from pydantic import ConfigDict

from infini_llama.configs.reading import JsonObject
from infini_llama.tasks.records.evaluation import Evaluations
from infini_llama.tasks.records.metrics import CheckpointFacts, Goodput, ValidationLine
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.records.status import AttemptRecord


class TrainingResult(Record):
    """The content of result.json, written by the workers when the run has finished.

    Attributes:
        stopped_early: train.early_stopping_patience, if that ended the run.
        checkpoint_digest: of the checkpoint of this step, whose weights these are.
        samples: texts that continue train.sample_prompts.
    """

    steps: int
    stopped_early: int | None = None
    parameters: int
    weights_sha256: str
    optimizer_sha256: str
    checkpoint_digest: str
    samples: tuple[str, ...] = ()

    def is_final(self, max_steps: int, patience: int | None) -> bool:
        """Whether training of this many steps, with this patience, has nothing left to do."""
        return self.steps >= max_steps or (
            self.stopped_early is not None and self.stopped_early == patience
        )


class RunPaths(Record):
    """Places of a finished run's files."""

    run: Path
    tensorboard: Path
    loss_curve: Path
    report: Path


class RunDescription(Record):
    """A run in full.

    Attributes:
        summary: of a finished run.
    """

    json_without = "unset"

    run: str
    finished: bool
    dataset: str
    model: JsonObject
    step: int
    train_loss: float | None
    validation: tuple[ValidationLine, ...]
    checkpoints: tuple[CheckpointFacts, ...]
    attempts: tuple[AttemptRecord, ...]
    summary: "RunSummary | None"


class RunResults(Record):
    """A run and its results so far.

    Attributes:
        state: finished, running, or how the last attempt ended.
        train_loss: of the last step whose update was not skipped, nats per token.
        validation_loss: of the last evaluation, nats per token.
        tokens: targets trained on, without those of another run from whose checkpoint it began.
        input_tokens: that the model read for them.
        step_seconds: spent in steps, over all attempts.
        tokens_per_second: read in steps.
        mfu: in those steps where it is known.
        seconds: since its first attempt started.
        goodput: share of `seconds` spent in steps.
        age: seconds since anything was last recorded.
        bytes: on disk.
    """

    run: str
    state: str
    step: int
    max_steps: int
    dataset: str
    parameters: int | None
    tokens: int
    input_tokens: int
    steps_without_targets: int
    train_loss: float | None
    validation_loss: float | None
    best_validation_loss: float | None
    bits_per_byte: float | None
    step_seconds: float
    tokens_per_second: float | None
    mfu: float | None
    goodput: float
    seconds: float
    attempts: int
    age: float
    bytes: int


class Comparison(Record):
    """Several runs beside one another.

    Attributes:
        runs: by name.
        differences: by dotted key of the configuration, the value of each run.
        same_validation: their validation losses are of the same rows of the same dataset.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    runs: dict[str, RunResults]
    differences: dict[str, JsonObject]
    same_validation: bool


class RunSummary(TrainingResult):
    """The content of summary.json.

    Attributes:
        train_loss, validation_loss, tokens, input_tokens, tokens_per_second: as in `RunResults`.
        unigram_entropy_bits: of the targets of the validation rows, per target; None: the dataset
            was moved or removed.
        seconds: spent in steps, over all attempts.
        updates_left_out: steps whose update was skipped because it was not finite or a spike.
        steps_without_targets: steps that changed nothing, since no token of their sequences was a
            target.
        checkpoint: the last one.
        already_finished: the command found nothing left to do.
    """

    run: str
    train_loss: float | None
    validation_loss: float | None
    validation_bits_per_token: float | None
    unigram_entropy_bits: float | None
    bits_per_byte: float | None
    best_validation_loss: float | None
    tokens: int
    input_tokens: int
    seconds: float
    tokens_per_second: float
    updates_left_out: int
    steps_without_targets: int
    attempts: int
    goodput: Goodput
    checkpoint: Path
    paths: RunPaths
    already_finished: bool = False


class PipelineResult(RunSummary):
    """The result of a pipeline: the summary, and what evaluate.after_training names.

    The latter is measurements and the exported folder.
    """

    evaluations: Evaluations | None = None
    export: Path | None = None

    def to_json(self) -> JsonObject:
        """JSON-serializable fields; without `evaluations` and `export` if there are none."""
        fields = self.model_dump(mode="json", exclude={"evaluations", "export"})
        if self.evaluations is not None:
            fields["evaluations"] = self.evaluations.to_json()
        if self.export is not None:
            fields["export"] = str(self.export)
        return fields
