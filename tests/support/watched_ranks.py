"""Three ranks as files on disk, a clock that the test moves, and the supervisor's watch over them."""

import pytest

from infini_llama.tasks.runs.heartbeat import LINE, heartbeat_path
from infini_llama.tasks.runs.status import write_status
from infini_llama.tasks.train.hangs import HangDetector


class Clock:
    """This process's clock, which the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float, watch: HangDetector) -> None:
        """Moves on, with the looks that a supervisor takes meanwhile."""
        for _ in range(round(2 * seconds)):
            watch.hung()
            self.now += 0.5


def place(folder, rank: int, step: int, phase: str, moment: float = 0.0) -> None:
    """Rank `rank` entered `phase` of the step after `step` at `moment` of its own host's clock."""
    heartbeat_path(folder, rank).write_text(LINE.format(step=step, phase=phase, time=moment))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(tmp_path, clock):
    """Three ranks, just seen in the step after 7."""
    for rank in range(3):
        write_status(tmp_path, rank, "running", 70)
        place(tmp_path, rank, 7, "compute")
    watch = HangDetector(tmp_path, 3, timeout=5.0, clock=clock)
    watch.longest = {"compute": 1.0, "data": 0.1}
    assert watch.hung() is None
    return watch
