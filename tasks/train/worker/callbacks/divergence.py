"""Updates that were left out because they were not finite: how many are borne, and which samples are never seen again."""

from dataclasses import dataclass

from infini_llama.tasks.train.worker.position import Position


class Diverged(Exception):
    """Too many updates in a window were not finite; `details` tells the supervisor where to go back to."""

    def __init__(self, skips: list[int], samples: int, window: int) -> None:
        super().__init__(
            f"{len(skips)} updates within {window} steps were not finite (or their loss was a spike), the first at step {skips[0]}; "
            "lower train.learning_rate, or look at the samples named in the log."
        )
        self.details = {"first_skip": skips[0], "samples": samples}


@dataclass
class Skips:
    """Counts the steps whose update was left out; those of the last `window` stand in the position, and so survive restarts."""

    limit: int
    window: int
    at: Position

    def note(self) -> None:
        """Counts the step that was just completed.

        Raises:
            Diverged: there are more than `limit` in the window.
        """
        step = self.at.step
        self.at.skips = [earlier for earlier in self.at.skips if earlier > step - self.window] + [step]
        if len(self.at.skips) > self.limit:
            raise Diverged(self.at.skips, self.at.samples, self.window)


def next_sample(samples: int, left_out: list[dict[str, int]]) -> int:
    """The first sample from number `samples` on that is in none of the ranges {"first", "end"} a rollback has left out."""
    for span in sorted(left_out, key=lambda span: span["first"]):
        if span["first"] <= samples < span["end"]:
            samples = span["end"]
    return samples
