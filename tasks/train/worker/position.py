"""How far a run has come: the scalars of a checkpoint that change from step to step."""

from dataclasses import asdict, dataclass, field, fields


@dataclass
class Position:
    """Everything that a resumed run needs to know beside its tensors.

    step: completed optimizer steps; samples: consumed, trained and left out alike; tokens: targets trained on; the last and
    the lowest validation loss, the former None unless measured at this step; skips: steps of late whose update was left out;
    losses: of late, where spikes are looked for.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    validation_loss: float | None = None
    best_validation_loss: float | None = None
    skips: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, scalars: dict) -> "Position":
        """Out of a checkpoint's scalars, which hold more than this."""
        return cls(**{item.name: scalars[item.name] for item in fields(cls) if item.name in scalars})

    def advance(self, samples: int, tokens: int) -> None:
        """One more step, over this many samples and targets."""
        self.step, self.samples, self.tokens = self.step + 1, self.samples + samples, self.tokens + tokens
        self.validation_loss = None

    def note_validation(self, loss: float) -> None:
        """Notes a validation loss of this step."""
        best = self.best_validation_loss
        self.validation_loss = loss
        self.best_validation_loss = loss if best is None else min(best, loss)

    def scalars(self) -> dict:
        return asdict(self)
