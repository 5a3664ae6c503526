"""Loss spikes: a step whose loss lies far above those before it, by a score that spikes themselves hardly move."""

from dataclasses import dataclass
from statistics import median

from infini_llama.tasks.train.worker.position import Position

HISTORY = 128  # losses that are remembered
ENOUGH = 32  # below this many nothing is called a spike
NORMAL = 1.4826  # median absolute deviation to standard deviation, for a normal distribution
SMALLEST = 1e-3  # of the median: losses that hardly differ make no spike of a small difference


@dataclass
class Spikes:
    """Robust z-score (Iglewicz and Hoaglin 1993): distance above the median, in median absolute deviations scaled to a standard one.

    Args:
        threshold: `train.spike_zscore`; None: nothing is a spike.
        at: keeps the losses of the last updates made, oldest first, so that a resumed run judges alike.
    """

    threshold: float | None
    at: Position

    def is_spike(self, loss: float) -> bool:
        """Whether an update of this loss is to be left out."""
        if self.threshold is None or len(self.at.losses) < ENOUGH:
            return False
        middle = median(self.at.losses)
        spread = NORMAL * median(abs(earlier - middle) for earlier in self.at.losses)
        return loss - middle > self.threshold * max(spread, SMALLEST * abs(middle))

    def note(self, loss: float) -> None:
        """Remembers the loss of an update that was made."""
        if self.threshold is not None:
            self.at.losses = [*self.at.losses, loss][-HISTORY:]
