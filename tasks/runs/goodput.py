"""The use of a run's time, over all its attempts.

Time trained the model, prepared for it, or was lost.
"""

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import field_validator

from infini_llama.configs.reading import changed
from infini_llama.tasks.records.metrics import Goodput, StartTime
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    attempt_folders,
    number_of,
    read_attempt_plan,
    read_attempts,
)
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.locks import this_machine
from infini_llama.tasks.storage.record_files import read_lines, with_checksum

# The part of the wall time to which each phase of a heartbeat is counted, in the order in which a
# step passes the phases.
PART_OF = {
    "start": "start_up",
    "compile": "compile",
    "data": "data_wait",
    "compute": "training",
    "metrics_hook": "training",
    "evaluate": "evaluation",
    "save": "save",
    "samples": "samples",
    "finish": "ending",
}
# In these phases a rank works on the step after the one it names.
FOR_THE_NEXT_STEP = ("data", "compute", "metrics_hook")
NOT_TRAINING = ("start", "compile", "finish")
LEDGER = "time.jsonl"
# Seconds by which the sum of a ledger's times may differ from its last time.
CLOCK_SECONDS = 1e-4
log = logging.getLogger("infini_llama.runs")


class _LedgerLine(Record):
    step: int
    time: float
    phases: dict[str, float]

    @field_validator("phases")
    @classmethod
    def _are_known(cls, phases: dict[str, float]) -> dict[str, float]:
        if not phases.keys() <= PART_OF.keys():
            raise ValueError("a phase is not known to this version")
        return phases


@dataclass(frozen=True)
class _Attempt:
    """An attempt: when it started and ended, from which step, and its ledger's lines.

    Attributes:
        recorded_until: the time of its last line.
        complete: it ended as intended.
    """

    start: float
    end: float
    from_step: int
    lines: list[_LedgerLine]
    recorded_until: float
    complete: bool


def goodput(
    run: RunFolder,
    from_step: int | None = None,
    now: float | None = None,
) -> Goodput:
    """The use of the time since the first attempt.

    Args:
        from_step: of the attempt that is about to start; None: there is none.
        now: when it starts, seconds since 1970.
    """
    spent = Goodput().parts()
    begun = _attempts(run)
    later = [attempt.from_step for attempt in begun[1:]]
    if from_step is not None:
        later.append(from_step)
    for number, attempt in enumerate(begun):
        _add_attempt(spent, attempt, kept=min(later[number:], default=None))
    starts = [attempt.start for attempt in begun]
    if now is not None:
        starts.append(now)
    spent["down"] = sum(
        max(0.0, after - attempt.end)
        for attempt, after in zip(begun, starts[1:], strict=False)
    )
    end = (
        now if now is not None else max((attempt.end for attempt in begun), default=0.0)
    )
    elapsed = end - starts[0] if starts else 0.0
    # The sum is larger where the clock went back between two attempts.
    return _of_parts(spent, max(sum(spent.values()), elapsed))


def seconds_after(run: RunFolder, step: int) -> float:
    """Seconds of training after the checkpoint of `step` was saved, lost or not.

    They are without start-up, compilation and the time between attempts.
    """
    attempts = _attempts(run)
    saved_by = [
        number for number, attempt in enumerate(attempts) if attempt.from_step < step
    ]
    seconds = 0.0
    for attempt in attempts[max(saved_by, default=0) :]:
        for line in attempt.lines:
            for phase, duration in line.phases.items():
                is_later = line.step > step or phase in FOR_THE_NEXT_STEP
                if line.step >= step and is_later and phase not in NOT_TRAINING:
                    seconds += duration
    return seconds


def _attempts(run: RunFolder) -> list[_Attempt]:
    """The attempts that can be counted, oldest first."""
    records = {record.attempt: record for record in read_attempts(run)}
    run_id = run.read_id()
    measured = [
        _attempt(folder, records.get(number_of(folder)), run_id)
        for folder in attempt_folders(run)
    ]
    return [attempt for attempt in measured if attempt is not None]


def _add_attempt(
    spent: dict[str, float],
    attempt: _Attempt,
    kept: int | None,
) -> None:
    """Add the time of an attempt to its parts.

    Args:
        kept: the last of its steps that no later attempt repeated; None: there is no later one.
    """
    for line in attempt.lines:
        for phase, seconds in line.phases.items():
            reached = line.step
            if phase in FOR_THE_NEXT_STEP:
                reached += 1
            lost = (
                kept is not None
                and reached > kept
                and phase not in ("start", "compile")
            )
            spent["lost_work" if lost else PART_OF[phase]] += seconds
    spent["ending" if attempt.complete else "lost_work"] += (
        attempt.end - attempt.recorded_until
    )


def _of_parts(spent: dict[str, float], wall: float) -> Goodput:
    share = spent["training"] / wall if wall else 0.0
    return Goodput.model_validate(spent | {"wall": wall, "share": share})


def _attempt(
    folder: Path,
    record: AttemptRecord | None,
    run_id: str,
) -> _Attempt | None:
    """One attempt; None for one that never started, or that cannot be counted."""
    try:
        begun = read_attempt_plan(folder, run_id)
    except (OSError, Damaged) as fault:
        log.warning("%s The time of %s is not counted.", fault, folder.name)
        return None
    start = begun.started.wall
    lines = read_lines(folder / LEDGER, _LedgerLine, run_id)
    recorded_until = lines[-1].time if lines else start
    seconds = record.seconds if record else None
    end = recorded_until if seconds is None else max(recorded_until, start + seconds)
    complete = record is not None and record.kind in ("done", "preempted")
    # A ledger has no gap, and its last line is of the step at which the attempt ended.
    counted = sum(sum(line.phases.values()) for line in lines)
    # A resumed one that finds nothing left to train has a line for its start only, before it knows
    # its step.
    reached = max(begun.from_step, lines[-1].step if lines else 0)
    ended_at = record.step if record is not None and complete else None
    if abs(recorded_until - start - counted) > CLOCK_SECONDS or reached < (
        ended_at or 0
    ):
        log.warning(
            "%s has lost lines: their time is not counted, or as lost.", folder / LEDGER
        )
    return _Attempt(start, end, begun.from_step, lines, recorded_until, complete)


class Ledger:
    """The ledger of an attempt, written by the first rank.

    It has for each step the seconds in every phase, without a gap.

    Args:
        path: of the attempt's ledger, in logs/attempt-NN of the run.
        started: when the attempt started, by both clocks of its supervisor; the monotonic one is
            the same for all processes of a machine, and means nothing on another.
        before: of the attempts before this one.
    """

    def __init__(self, path: Path, started: StartTime, before: Goodput) -> None:
        self.file = path.open("a", encoding="utf-8")
        self.run_id = RunFolder(path.parents[2]).read_id()
        if started.machine != this_machine():
            monotonic = time.monotonic() - max(0.0, time.time() - started.wall)
            started = changed(started, monotonic=monotonic)
        self.started = started
        self.before = before
        self.last = started.monotonic
        self.phases: dict[str, float] = {}
        self.totals = dict.fromkeys(PART_OF.values(), 0.0)

    def leave(self, phase: str) -> None:
        """Count the time since the last call to `phase`."""
        now = time.monotonic()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.last
        self.totals[PART_OF[phase]] += now - self.last
        self.last = now

    def close_step(self, step: int) -> None:
        """Write down what was counted since the last call, while `step` steps were complete."""
        wall = self.started.wall + self.last - self.started.monotonic
        fields = json.dumps({"step": step, "time": wall, "phases": self.phases})
        self.file.write(with_checksum(fields, self.run_id) + "\n")
        self.file.flush()
        self.phases = {}

    def spent(self) -> Goodput:
        """The use of the time so far, with that of earlier attempts."""
        parts = self.before.parts()
        for part, seconds in self.totals.items():
            parts[part] += seconds
        return _of_parts(parts, self.before.wall + self.last - self.started.monotonic)
