"""Every run below home, one line per run."""

import logging
from pathlib import Path
from typing import Any

from infini_llama.tasks.runs.record import RunRecord
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.sizes import size_of

log = logging.getLogger("infini_llama.runs")


def list_runs(home: Path) -> list[dict[str, Any]]:
    """The runs of `home`, the one that was last worked on first; ages in seconds, sizes in bytes."""
    found = []
    for path in (home / "runs").glob("*/lineage.json"):
        try:
            found.append(_facts(RunRecord(path.parent)))
        except Damaged as fault:
            log.warning("run %s is skipped: %s", path.parent.name, fault)
    return sorted(found, key=lambda run: run["age"])


def _facts(run: RunRecord) -> dict[str, Any]:
    losses = [record["loss"] for record in run.trained if record["loss"] is not None]
    validated = run.validated
    return {
        "run": run.name,
        "state": run.state,
        "step": run.step,
        "max_steps": run.max_steps,
        "train_loss": losses[-1] if losses else None,
        "validation_loss": validated[-1]["loss"] if validated else None,
        "attempts": len(run.attempts),
        "age": run.age,
        "bytes": size_of(run.path),
        "dataset": run.lineage.dataset.path,
    }
