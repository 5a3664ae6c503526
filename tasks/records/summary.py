"""The results of a finished run."""

from pathlib import Path
from typing import Any

from infini_llama.tasks.records.evaluation import Evaluations
from infini_llama.tasks.records.goodput import Goodput
from infini_llama.tasks.records.record import Record


class TrainingResult(Record):
    """Written by the workers as result.json when the run has finished.

    Attributes:
        stopped_early: train.early_stopping_patience, if that ended the run.
        parameters, weights_sha256, optimizer_sha256: None: an older version did not record them.
        sample: text that continues train.sample_prompt; samples: those of train.sample_prompts.
    """

    steps: int
    stopped_early: int | None = None
    parameters: int | None = None
    weights_sha256: str | None = None
    optimizer_sha256: str | None = None
    sample: str
    samples: tuple[str, ...] = ()


class RunPaths(Record):
    """Where a finished run's files are."""

    run: Path
    tensorboard: Path
    loss_curve: Path
    report: Path


class RunSummary(TrainingResult):
    """Written as summary.json.

    Attributes:
        train_loss, validation_loss: of the last step and the last evaluation, nats per token.
        seconds: spent in steps, over all attempts.
        updates_left_out: steps whose update was skipped because it was not finite or a spike.
        checkpoint: the last one.
    """

    run: str
    train_loss: float | None = None
    validation_loss: float | None
    validation_bits_per_token: float | None
    unigram_entropy_bits: float
    bits_per_byte: float | None
    best_validation_loss: float | None = None
    tokens: int
    seconds: float = 0.0
    tokens_per_second: float
    updates_left_out: int = 0
    attempts: int = 0
    goodput: Goodput = Goodput()
    checkpoint: Path
    paths: RunPaths
    already_finished: bool = False


class PipelineResult(RunSummary):
    """What a pipeline returns: the summary, and the results of evaluate.after_training where it names a measurement."""

    evaluations: Evaluations | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-serializable fields; without `evaluations` if there are none."""
        evaluations = {} if self.evaluations is None else {"evaluations": self.evaluations.to_json()}
        return self.model_dump(mode="json", exclude={"evaluations"}) | evaluations
