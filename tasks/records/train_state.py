"""The state of a training beside its tensors: the scalars of a checkpoint."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from infini_llama.configs.reading import JsonObject

SKIP_WINDOW = 100  # steps over which skipped updates are counted


@dataclass
class TrainState:
    """The progress of a run.

    It changes with every step; a checkpoint has it as train_state.json, under these names.

    Attributes:
        step: completed optimizer steps.
        samples: consumed ones, including those whose update was skipped.
        tokens: targets trained on.
        validation_loss: measured at this step, nats per token.
        best_validation_loss: the lowest so far.
        skips: of the update policy: recent steps whose update was skipped.
        losses: of the update policy: those of recent updates, in which spikes are looked for.
        stale_validations: since one was the lowest.
        evaluation_due: the evaluation after this step was given up for a request to stop; the next
            attempt begins with it.
        loss_scale, steps_at_scale: of the update policy, with fp16.
        world_size: workers that train.
        model: fields of LlamaConfig.
        dataset: digest of the dataset.
        optimizer: `train.optimizer`, whose state the checkpoint has; None: an older version of this
            program did not record it.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    validation_loss: float | None = None
    best_validation_loss: float | None = None
    skips: list[int] = field(default_factory=list[int])
    losses: list[float] = field(default_factory=list[float])
    stale_validations: int = 0
    evaluation_due: bool = False
    loss_scale: float | None = None
    steps_at_scale: int = 0
    world_size: int = 1
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    dataset: str | None = None
    optimizer: str | None = None

    @classmethod
    def read_json(cls, text: bytes | str) -> "TrainState":
        """Parse a checkpoint's train_state.json.

        Raises:
            pydantic.ValidationError: it is not JSON, or a field has another type.
        """
        return _ADAPTER.validate_json(text, strict=True)

    def to_json(self) -> JsonObject:
        """JSON-serializable fields; later changes of this state do not change them."""
        return asdict(self)

    def advance(self, samples: int, tokens: int) -> None:
        """Count one more step, over this many samples and targets."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens
        self.validation_loss = None

    def record_validation(self, loss: float) -> None:
        """Record a validation loss of this step.

        One that is not finite is not kept and never the best.
        """
        if not math.isfinite(loss):
            self.stale_validations += 1
            return
        self.validation_loss = loss
        if self.best_validation_loss is None or loss < self.best_validation_loss:
            self.best_validation_loss = loss
            self.stale_validations = 0
        else:
            self.stale_validations += 1

    def is_finished(self, max_steps: int, patience: int | None) -> bool:
        """Whether all steps are done, or `patience` validations in a row brought no gain.

        The evaluation of the last step belongs to it.
        """
        if self.evaluation_due:
            return False
        return self.step >= max_steps or (
            patience is not None and self.stale_validations >= patience
        )


_ADAPTER = TypeAdapter(TrainState)
