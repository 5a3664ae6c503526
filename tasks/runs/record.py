"""What a run's folder says of it, while it goes on as well as afterwards, and the list of all runs; no tensor is read."""

import logging
import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from infini_llama.configs.reading import JsonObject
from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.records.manifest import DatasetManifest, RowTableManifest
from infini_llama.tasks.records.metrics import (
    EVALUATION_LINE,
    CheckpointFacts,
    EvaluationLine,
    Goodput,
    MetricsLine,
    SampleLine,
    TrainLine,
    ValidationLine,
)
from infini_llama.tasks.records.plan import EnvironmentRecord
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.records.summary import RunDescription, RunStatus, TrainingResult
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.goodput import goodput
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    attempt_folders,
    attempts,
    number_of,
    read_metrics,
    size_of,
    warn_of_lacking_steps,
)
from infini_llama.tasks.storage.artifacts import Damaged, read_dataset, read_row_table
from infini_llama.tasks.storage.json_lines import read_lines
from infini_llama.tasks.storage.locks import lock_holder

log = logging.getLogger("infini_llama.runs")


@dataclass(frozen=True)
class DatasetManifests:
    """Of a run's dataset, and of the row table that it trains on."""

    tokens: DatasetManifest
    rows: RowTableManifest


@dataclass(frozen=True)
class RunRecord:
    """The records of the run in folder `path`; each file is read once.

    Raises:
        ConfigError: it is the folder of no run.
        Damaged: lineage.json cannot be read, and no attempt has a copy.
    """

    path: Path

    def __post_init__(self) -> None:
        self.folder.require_is_run()

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def lineage(self) -> Lineage:
        return self.folder.require_lineage()

    @cached_property
    def config(self) -> JsonObject:
        """config.yaml as it was written, perhaps for another version; without it, the section `train` of the lineage."""
        try:
            config = self.folder.read_config()
        except Damaged as fault:
            log.warning("%s The settings in lineage.json are used.", fault)
            config = None
        return config if config and "train" in config else {"train": self.lineage.train.model_dump(mode="json")}

    @cached_property
    def metrics(self) -> list[MetricsLine]:
        """Every line of metrics.jsonl that can be read, with a warning where steps up to the newest checkpoint are missing."""
        warn_of_lacking_steps(self.folder, checkpoints.latest_step(self.folder.checkpoints))
        return read_metrics(self.folder)

    @cached_property
    def trained(self) -> list[TrainLine]:
        return [line for line in self.metrics if isinstance(line, TrainLine)]

    @cached_property
    def validated(self) -> list[ValidationLine]:
        return [line for line in self.metrics if isinstance(line, ValidationLine)]

    @property
    def train_losses(self) -> list[float]:
        """Of the steps whose update was not skipped."""
        return [line.loss for line in self.trained if line.loss is not None]

    @property
    def validation_losses(self) -> list[float]:
        """Those that are finite."""
        return [line.loss for line in self.validated if line.loss is not None]

    @property
    def step_seconds(self) -> float:
        """Spent in steps, over all attempts."""
        return sum(line.step_time for line in self.trained)

    @property
    def tokens(self) -> int:
        """Targets trained on."""
        return self.trained[-1].tokens if self.trained else 0

    @property
    def tokens_per_second(self) -> float | None:
        """Over all steps; None before the first one."""
        return self.tokens / self.step_seconds if self.step_seconds else None

    @cached_property
    def attempts(self) -> list[AttemptRecord]:
        """Those whose line can be read, with a warning where attempts that have ended have none."""
        recorded = attempts(self.folder)
        missing = {number_of(folder) for folder in attempt_folders(self.folder)} - {
            record.attempt for record in recorded
        }
        if missing and lock_holder(self.path / "lock") is None:
            names = ", ".join(map(str, sorted(missing)))
            log.warning(
                "%s has no line of attempt %s: it was killed, or the line is lost.", self.folder.attempts, names
            )
        return recorded

    @cached_property
    def result(self) -> TrainingResult | None:
        """What the finished run left; None where it has not ended, or has trained since: its last checkpoint is another one."""
        result = self.folder.read_record(TrainingResult, self.folder.result)
        if result is None and self.folder.summary.exists():
            log.warning("%s is missing or damaged, although the run has a summary.", self.folder.result)
        if result is None or result.steps != self.step:
            return None
        if not self.folder.summary.exists():
            log.warning("%s is missing, although the run has a result; `run` writes it again.", self.folder.summary)
        for fault in checkpoints.faults(self.folder.checkpoints):
            log.warning("%s", fault)
        if not checkpoints.is_digest_at(self.folder.checkpoints, result.steps, result.checkpoint_digest):
            log.warning(
                "%s is not of the checkpoint of its step; the run is not taken for finished.", self.folder.result
            )
            return None
        return result

    @cached_property
    def step(self) -> int:
        return self.trained[-1].step if self.trained else 0

    @property
    def max_steps(self) -> int:
        return self.lineage.max_steps

    @cached_property
    def environment(self) -> EnvironmentRecord | None:
        """What patch-environment recorded; None for a run of `train` called as a function, with a plan of its caller's."""
        return self.folder.read_record(EnvironmentRecord, self.folder.environment)

    @cached_property
    def dataset(self) -> DatasetManifests | None:
        """The manifests of its dataset; None where the dataset was moved, removed or damaged."""
        dataset = self.lineage.dataset
        folder = self.path.parent.parent / dataset.path
        try:
            manifests = DatasetManifests(read_dataset(folder), read_row_table(folder / "chunks" / dataset.chunks))
            if manifests.tokens.digest != dataset.digest:
                raise Damaged(f"{folder} is not the dataset that the run was trained on.")
            return manifests
        except Damaged as fault:
            if folder.is_dir():  # else it was moved or removed
                log.warning("%s What the dataset's manifests say is left out.", fault)
            return None

    @cached_property
    def checkpoints(self) -> list[CheckpointFacts]:
        """The committed ones, newest first."""
        folder = self.folder.checkpoints
        for fault in checkpoints.faults(folder):
            log.warning("%s", fault)
        best = checkpoints.best(folder)
        return [
            CheckpointFacts(
                name=path.name,
                step=checkpoints.step_of(path),
                validation_loss=loss,
                bytes=size_of(path),
                latest=number == 0,
                best=path == best,
            )
            for number, (path, loss) in enumerate(checkpoints.losses(folder))
        ]

    @cached_property
    def goodput(self) -> Goodput:
        return goodput(self.folder)

    @cached_property
    def evaluations(self) -> list[EvaluationLine]:
        """What `evaluate` measured of its model, the oldest first."""
        if self.folder.evaluations.is_file() and not self.folder.evaluations.stat().st_size:
            log.warning("%s is empty: what it had is lost.", self.folder.evaluations)
        return read_lines(self.folder.evaluations, EVALUATION_LINE, self.folder.id)

    @cached_property
    def samples(self) -> list[SampleLine]:
        """Texts by the model: those of samples.jsonl, with a warning where it lacks some, and, last, the finished model's."""
        texts = self.result.samples if self.result else ()
        written = read_lines(self.folder.samples, SampleLine, self.folder.id)
        evaluated = {line.step for line in self.validated if line.step < self.step}
        ends = {attempt.step for attempt in self.attempts if attempt.kind == "done"}  # where texts go into the result
        lacking = evaluated - ends - {line.step for line in written}
        if written and lacking:
            log.warning("%s lacks the texts of step %s.", self.folder.samples, ", ".join(map(str, sorted(lacking))))
        return written + [SampleLine(step=self.step, text=text) for text in texts]

    @cached_property
    def state(self) -> str:
        """finished, running, or how the last attempt ended."""
        if self.result:
            return "finished"
        if lock_holder(self.path / "lock") is not None:
            return "running"
        if not self.attempts:
            return "killed" if attempt_folders(self.folder) else "not begun"
        last = self.attempts[-1]
        begun = max(map(number_of, attempt_folders(self.folder)), default=0)
        if last.attempt < begun:
            return "killed"
        return "stopped" if last.kind == "preempted" else f"failed ({last.code})" if last.code else "to finish"

    @property
    def age(self) -> float:
        """Seconds since anything was last recorded."""
        files = [path for path in (self.folder.metrics, self.folder.lineage, self.folder.summary) if path.exists()]
        return max(0.0, time.time() - max(path.stat().st_mtime for path in files))


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
