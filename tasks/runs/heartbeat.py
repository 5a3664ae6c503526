"""Signs of life: a rank says where it is, cheaply enough to do so several times a step."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from infini_llama.tasks.runs.goodput import Ledger

# In the order in which a step passes them; a rank in an earlier one holds up those in a later one.
PHASES = ("start", "compile", "data", "compute", "evaluate", "save", "finish")
Beat = tuple[int, str, float]  # step, phase and the time by the clock of the rank's own machine
LINE = "{step:>12} {phase:<10} {time:>20.6f}\n"


def heartbeat_path(attempt_dir: Path, rank: int) -> Path:
    return attempt_dir / f"heartbeat-{rank}"


class Heartbeat:
    """Overwrites one line of a file: step, phase and the system's monotonic clock (seconds, the same for all processes).

    A `ledger` counts the time of each phase.
    """

    def __init__(self, attempt_dir: Path, rank: int, ledger: Ledger | None = None) -> None:
        self.file = os.open(heartbeat_path(attempt_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.step, self.phase, self.ledger = 0, "start", ledger
        self.sample_rows: Callable[[], list[int]] | None = None  # row numbers of the step, for a failure's record
        self.beat("start")

    def beat(self, phase: str, step: int | None = None) -> None:
        """Says that this rank enters `phase` of the step after `step` completed ones (default: as before)."""
        if self.ledger is not None:
            self.ledger.leave(self.phase)
            if step is not None and (step != self.step or phase == "finish"):
                self.ledger.close_step(self.step)
        if step is not None:
            self.step = step
        self.phase = phase
        os.pwrite(self.file, LINE.format(step=self.step, phase=phase, time=time.monotonic()).encode(), 0)


def read_heartbeat(path: Path) -> Beat | None:
    """(step, phase, time) of a rank's last sign of life, None before the first."""
    try:
        step, phase, moment = path.read_text(encoding="utf-8").split()
        return int(step), phase, float(moment)
    except (OSError, ValueError):
        return None
