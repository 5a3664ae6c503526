"""Where a run's time went, over all its attempts: what trained the model, what prepared for it, and what was lost."""

import json
import time
from pathlib import Path
from typing import Any

from infini_llama.tasks.runs.run_folder import RunFolder, attempt_folders, attempts, number_of
from infini_llama.tasks.storage.json_lines import Line, read_lines
from infini_llama.tasks.storage.lease import this_machine

# Parts of the wall time, by the phase of `worker.heartbeat` that is counted to each.
PHASE_OF = {
    "start_up": "start",
    "compile": "compile",
    "data_wait": "data",
    "training": "compute",
    "evaluation": "evaluate",
    "save": "save",
    "ending": "finish",
}
PARTS = (*PHASE_OF, "lost_work", "down")
FOR_THE_NEXT_STEP = ("data", "compute")  # in these phases a rank works on the step behind the one it names
LEDGER = "time.jsonl"


def goodput(run: RunFolder, from_step: int | None = None, now: float | None = None) -> dict[str, float]:
    """Seconds of each of PARTS since the first attempt began, "wall" for all of it, and "share" of it that was training.

    lost_work: steps (with their data, evaluation and saves) that a later attempt had to do again, and the time between the last
    whole step of a failed attempt and its end; down: between attempts.

    Args:
        from_step: where the attempt that is about to begin takes up; None where there is none.
        now: when it begins, seconds since 1970.
    """
    spent = dict.fromkeys(PARTS, 0.0)
    records = {record["attempt"]: record for record in attempts(run)}
    told = [_story(folder, records) for folder in attempt_folders(run)]
    stories = [story for story in told if story is not None]
    later = [story["from_step"] for story in stories[1:]] + ([] if from_step is None else [from_step])
    for number, story in enumerate(stories):
        kept = min(later[number:], default=None)
        for line in story["lines"]:
            for part, phase in PHASE_OF.items():
                reached = line["step"] + (phase in FOR_THE_NEXT_STEP)
                lost = kept is not None and reached > kept and part not in ("start_up", "compile")
                spent["lost_work" if lost else part] += line["phases"].get(phase, 0.0)
        spent["ending" if story["whole"] else "lost_work"] += story["end"] - story["told_until"]
    begun = [story["began"] for story in stories] + ([] if now is None else [now])
    spent["down"] = sum(max(0.0, after - story["end"]) for story, after in zip(stories, begun[1:], strict=False))
    end = now if now is not None else max((story["end"] for story in stories), default=0.0)
    wall = end - begun[0] if begun else 0.0
    return spent | {"wall": wall, "share": spent["training"] / wall if wall else 0.0}


def _story(folder: Path, records: dict[int, dict]) -> dict | None:
    """One attempt: when it began and ended, from which step, and its ledger's lines; None for one that never began.

    records: of attempts.jsonl, by the attempt's number.
    """
    try:
        order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
        began, from_step = float(order["began"]["wall"]), int(order["from_step"])
    except (OSError, ValueError, KeyError, TypeError):  # killed before, of an older version, or damaged
        return None
    lines = read_lines(folder / LEDGER, _LedgerLine)
    told_until = lines[-1]["time"] if lines else began
    record = records.get(number_of(folder), {})
    end = max(told_until, began + record["seconds"]) if record.get("seconds") is not None else told_until
    whole = record.get("kind") in ("done", "preempted")
    return {
        "began": began,
        "end": end,
        "from_step": from_step,
        "lines": lines,
        "told_until": told_until,
        "whole": whole,
    }


class _LedgerLine(Line):
    step: int
    time: float
    phases: dict[str, float]


class Ledger:
    """Written by the first rank: for each step the seconds in every phase, without a gap.

    Args:
        path: of the attempt's ledger.
        began: {"wall", "monotonic", "machine"}: when the attempt began, by both clocks of its leader; the latter is one for all
            processes of a machine, and says nothing on another.
        before: `goodput` of the attempts before this one.
    """

    def __init__(self, path: Path, began: dict[str, Any], before: dict[str, float]) -> None:
        self.file = path.open("a", encoding="utf-8")
        if began["machine"] != this_machine():
            began = began | {"monotonic": time.monotonic() - max(0.0, time.time() - began["wall"])}
        self.began, self.before = began, before
        self.last = began["monotonic"]
        self.phases: dict[str, float] = {}
        self.totals = dict.fromkeys(PHASE_OF.values(), 0.0)

    def leave(self, phase: str) -> None:
        """Counts the time since the last call to `phase`."""
        now = time.monotonic()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.last
        self.totals[phase] += now - self.last
        self.last = now

    def close_step(self, step: int) -> None:
        """Writes down what was counted since the last call, while `step` steps were complete."""
        wall = self.began["wall"] + self.last - self.began["monotonic"]
        self.file.write(json.dumps({"step": step, "time": wall, "phases": self.phases}) + "\n")
        self.file.flush()
        self.phases = {}

    def spent(self) -> dict[str, float]:
        """Seconds of every part so far, with those of earlier attempts, as `goodput` gives them."""
        parts = {part: self.before[part] + self.totals.get(PHASE_OF.get(part, ""), 0.0) for part in PARTS}
        wall = self.before["wall"] + self.last - self.began["monotonic"]
        return parts | {"wall": wall, "share": parts["training"] / wall if wall else 0.0}
