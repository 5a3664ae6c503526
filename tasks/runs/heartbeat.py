"""Heartbeats: a rank records its step and phase, at a cost that allows several per step."""

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from infini_llama.tasks.runs.goodput import PART_OF, Ledger

# In the order in which a step passes them; a rank in an earlier one holds up those in a later one.
PHASES = tuple(PART_OF)
LINE = "{step:>12} {phase:<12} {time:>20.6f}\n"
BEYOND_LINE = len(LINE.format(step=0, phase="", time=0.0))
PUBLISH_SECONDS = 1.0
# Times runtime.hang_timeout that a phase may take whose duration is not known.
UNKNOWN = 30
# File in the attempt's folder: every rank of another machine writes its stacks into its log.
STACKS = "write-stacks"


class HeartbeatRecord(NamedTuple):
    """A rank's newest heartbeat: it works in `phase` after `step` completed steps.

    Attributes:
        time: by the clock of its own machine.
    """

    step: int
    phase: str
    time: float


def heartbeat_path(attempt_dir: Path, rank: int) -> Path:
    return attempt_dir / f"heartbeat-{rank}"


class Heartbeat:
    """A rank's heartbeat: one line of a file, which each beat overwrites.

    The line has step, phase and the system's monotonic clock (seconds, the same for all processes
    of a machine). A `ledger` counts the time of each phase.
    """

    def __init__(
        self,
        attempt_dir: Path,
        rank: int,
        ledger: Ledger | None = None,
    ) -> None:
        path = heartbeat_path(attempt_dir, rank)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.attempt_dir = attempt_dir
        self.step: int = 0
        self.phase = "start"
        self.ledger = ledger
        # Row numbers of the step, for a failure's record.
        self.sample_rows: Callable[[], list[int]] | None = None
        self.beat("start")

    def publish(self) -> None:
        """Have a thread write the file through to the other machines of a network filesystem.

        It does so once per second. A counter after the line shows them that the process runs.
        """
        threading.Thread(target=self._publish, name="heartbeat", daemon=True).start()

    def _publish(self) -> None:
        count = 0
        dumped = False
        while True:
            count += 1
            with suppress(OSError):  # the filesystem does not answer just now
                os.pwrite(self.file, f"{count:>12}\n".encode(), BEYOND_LINE)
                os.fsync(self.file)
                if not dumped and (self.attempt_dir / STACKS).exists():
                    dumped = True
                    faulthandler.dump_traceback(all_threads=True)
            time.sleep(PUBLISH_SECONDS)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Record that this rank enters `phase` of the step after `step` completed ones.

        Args:
            phase: one of PHASES.
            step: None: as before.
        """
        if self.ledger is not None:
            self.ledger.leave(self.phase)
            if step is not None and (step != self.step or phase == "finish"):
                self.ledger.close_step(self.step)
        if step is not None:
            self.step = step
        self.phase = phase
        line = LINE.format(step=self.step, phase=phase, time=time.monotonic())
        os.pwrite(self.file, line.encode(), 0)

    @contextmanager
    def during(self, phase: str) -> Generator[None]:
        """Enter `phase` for the block, and after it the phase before."""
        before = self.phase
        self.beat(phase)
        try:
            yield
        finally:
            self.beat(before)


def read_heartbeat(path: Path) -> HeartbeatRecord | None:
    """A rank's newest heartbeat, None before the first."""
    try:
        step, phase, moment, *_ = path.read_text(encoding="utf-8").split()
        record = HeartbeatRecord(int(step), phase, float(moment))
    except (OSError, ValueError):
        return None
    return record if phase in PHASES else None


def read_count(path: Path) -> int:
    """Number of times that a rank on another machine has published its heartbeat."""
    try:
        return int(path.read_text(encoding="utf-8").split()[3])
    except (OSError, ValueError, IndexError):
        return 0
