"""How far a run has come: the scalars of a checkpoint that change from step to step."""

import math
from dataclasses import asdict, dataclass, field, fields


@dataclass
class Position:
    """Everything that a resumed run needs to know beside its tensors.

    step: completed optimizer steps; samples: consumed, trained and left out alike; tokens: targets trained on; the last and
    the lowest validation loss, the former None unless measured at this step; skips: steps of late whose update was left out;
    losses: of late, where spikes are looked for;
    stale_validations: since one was lower by `early_stopping_min_delta` than `stopping_loss`; loss_scale, steps_at_scale: fp16's.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    validation_loss: float | None = None
    best_validation_loss: float | None = None
    skips: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    stopping_loss: float | None = None
    stale_validations: int = 0
    loss_scale: float | None = None
    steps_at_scale: int = 0

    @classmethod
    def of(cls, scalars: dict) -> "Position":
        """Out of a checkpoint's scalars, which hold more than this."""
        return cls(**{item.name: scalars[item.name] for item in fields(cls) if item.name in scalars})

    def advance(self, samples: int, tokens: int) -> None:
        """One more step, over this many samples and targets."""
        self.step, self.samples, self.tokens = self.step + 1, self.samples + samples, self.tokens + tokens
        self.validation_loss = None

    def note_validation(self, loss: float, min_delta: float) -> None:
        """Notes a validation loss of this step; one that is not finite is neither kept nor ever the best."""
        if not math.isfinite(loss):
            self.stale_validations += 1
            return
        self.validation_loss = loss
        if self.best_validation_loss is None or loss < self.best_validation_loss:
            self.best_validation_loss = loss
        if self.stopping_loss is None or loss < self.stopping_loss - min_delta:
            self.stopping_loss, self.stale_validations = loss, 0
        else:
            self.stale_validations += 1

    def ended(self, max_steps: int, patience: int | None) -> bool:
        """Whether the run is done: all its steps, or so many validations without a gain."""
        return self.step >= max_steps or (patience is not None and self.stale_validations >= patience)

    def scalars(self) -> dict:
        return asdict(self)
