"""Every run below home, one line per run, and one run in full."""

import logging
import os
from pathlib import Path

from infini_llama.tasks.records.summary import RunDescription, RunStatus
from infini_llama.tasks.runs.record import RunRecord
from infini_llama.tasks.runs.run_folder import size_of
from infini_llama.tasks.storage.artifacts import Damaged

log = logging.getLogger("infini_llama.runs")


def list_runs(home: Path) -> list[RunStatus]:
    """The runs of `home`, the one that was last worked on first; ages in seconds, sizes in bytes."""
    found: list[RunStatus] = []
    for path in sorted((home / "runs").glob("*/checkpoints")):
        if not os.path.lexists(path.parent / "lineage.json") and any(path.iterdir()):
            log.warning("run %s is skipped: it has checkpoints, and no lineage.json.", path.parent.name)
    for path in (home / "runs").glob("*/lineage.json"):
        try:
            found.append(_status(RunRecord(path.parent)))
        except Damaged as fault:
            log.warning("run %s is skipped: %s", path.parent.name, fault)
    return sorted(found, key=lambda run: run.age)


def _status(run: RunRecord) -> RunStatus:
    return RunStatus(
        run=run.name,
        state=run.state,
        step=run.step,
        max_steps=run.max_steps,
        train_loss=run.train_losses[-1] if run.train_losses else None,
        validation_loss=run.validated[-1].loss if run.validated else None,
        attempts=len(run.attempts),
        age=run.age,
        bytes=size_of(run.path),
        dataset=run.lineage.dataset.path,
    )


def describe_run(path: Path) -> RunDescription:
    """Progress, losses, checkpoints and attempts of the run in folder `path`.

    Raises:
        ConfigError: it is the folder of no run.
        Damaged: lineage.json cannot be read, and no attempt has a copy.
    """
    run = RunRecord(path)
    return RunDescription(
        run=run.name,
        finished=run.folder.summary.exists(),
        dataset=run.lineage.dataset.path,
        model=run.lineage.model.to_dict(),
        step=run.step,
        train_loss=run.trained[-1].loss if run.trained else None,
        validation=tuple(run.validated),
        checkpoints=tuple(run.checkpoints),
        attempts=tuple(run.attempts),
        summary=run.folder.read_or_rebuild(run.folder.summary) or None,
    )
