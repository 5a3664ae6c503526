"""A run as its folder describes it, while it runs and afterwards, and the list of all runs.

No tensor is read.
"""

import logging
import math
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import JsonValue

from infini_llama.configs.reading import JsonObject, dotted
from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.records.manifest import DatasetManifest, RowTableManifest
from infini_llama.tasks.records.metrics import (
    EVALUATION_LINE,
    CheckpointFacts,
    EvaluationLine,
    Goodput,
    MetricsLine,
    PerplexityLine,
    SampleLine,
    TrainLine,
    ValidationLine,
)
from infini_llama.tasks.records.plan import EnvironmentRecord
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.records.summary import (
    RunDescription,
    RunPaths,
    RunResults,
    RunSummary,
    TrainingResult,
)
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.goodput import goodput
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    attempt_folders,
    attempt_plan_path,
    number_of,
    read_attempt_plan,
    read_attempts,
    read_metrics,
    run_folders,
    size_of,
)
from infini_llama.tasks.storage.artifacts import (
    EXPORT,
    ROW_TABLES,
    Damaged,
    has_all_files,
    read_dataset,
    read_row_table,
)
from infini_llama.tasks.storage.locks import lock_holder
from infini_llama.tasks.storage.record_files import SHOWN, read_lines

log = logging.getLogger("infini_llama.runs")


@dataclass(frozen=True)
class DatasetManifests:
    """The manifests of a run's dataset and of the row table that it trains on."""

    tokens: DatasetManifest
    rows: RowTableManifest


@dataclass(frozen=True)
class RunReader:
    """The records of the run in folder `path`; each file is read once.

    Raises:
        ConfigError: on reading the lineage: it is the folder of no run.
        Damaged: on reading the lineage: lineage.json cannot be read, and no attempt has a copy.
    """

    path: Path

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
        """config.yaml as it was written; without it, the section `train` of the lineage."""
        try:
            config = self.folder.read_config()
        except Damaged as fault:
            log.warning("%s The settings in lineage.json are used.", fault)
            config = None
        if config and "train" in config:
            return config
        return {"train": self.lineage.train.model_dump(mode="json")}

    @cached_property
    def metrics(self) -> list[MetricsLine]:
        """Every readable line of metrics.jsonl.

        A warning names the steps and validations up to the newest checkpoint that it lacks.
        """
        lines = read_metrics(self.folder)
        trained = {line.step for line in lines if isinstance(line, TrainLine)}
        validated = {line.step for line in lines if isinstance(line, ValidationLine)}
        newest = next(iter(checkpoints.committed(self.folder.checkpoints)), None)
        newest_step = newest.step if newest else 0
        # A run may have begun from a checkpoint of another one.
        first = min(trained, default=1) if self.lineage.resumed_from else 1
        expected = range(first, newest_step + 1)
        given_up = (
            {newest_step} if newest and _is_evaluation_due(newest) else set[int]()
        )
        _warn_of_missing(self.folder.metrics, "line of step", set(expected) - trained)
        for steps, train in self._trained_with:
            interval = train.eval_steps
            if isinstance(interval, int):
                of_attempt = expected[
                    max(0, steps.start - first) : max(0, steps.stop - first)
                ]
                due = {step for step in of_attempt if step % interval == 0} - given_up
                what = f"validation (one every {interval} steps) of step"
                _warn_of_missing(self.folder.metrics, what, due - validated)
        return lines

    @cached_property
    def _trained_with(self) -> list[tuple[range, TrainingConfig]]:
        """The steps that each attempt trained, which no later one repeated, with its settings.

        An attempt whose plan cannot be read is left out.
        """
        parts: list[tuple[range, TrainingConfig]] = []
        end = sys.maxsize
        run_id = self.folder.read_id()
        for attempt_dir in reversed(attempt_folders(self.folder)):
            with suppress(OSError, Damaged):
                plan = read_attempt_plan(attempt_dir, run_id)
                parts.append((range(plan.from_step + 1, end), plan.lineage.train))
                end = min(end, plan.from_step + 1)
        return parts

    @cached_property
    def trained(self) -> list[TrainLine]:
        return [line for line in self.metrics if isinstance(line, TrainLine)]

    @cached_property
    def validated(self) -> list[ValidationLine]:
        return [line for line in self.metrics if isinstance(line, ValidationLine)]

    @property
    def before_training(self) -> ValidationLine | None:
        """Results of the weights before the first step, if the run starts from those of a model."""
        return next((line for line in self.validated if line.step == 0), None)

    @cached_property
    def attempts(self) -> list[AttemptRecord]:
        """The attempts whose line can be read.

        There is a warning where attempts that have ended have none.
        """
        recorded = read_attempts(self.folder)
        if self.result or lock_holder(self.folder.lock) is None:
            begun = set(map(number_of, attempt_folders(self.folder)))
            _warn_of_missing(
                self.folder.attempts,
                "end of attempt",
                begun - {record.attempt for record in recorded},
            )
        return recorded

    @cached_property
    def committed(self) -> list[checkpoints.Checkpoint]:
        """The committed checkpoints, newest first, with a warning for each damaged one."""
        for fault in checkpoints.faults(self.folder.checkpoints):
            log.warning("%s The checkpoint is left out.", fault)
        return checkpoints.committed(self.folder.checkpoints)

    @cached_property
    def result(self) -> TrainingResult | None:
        """The result of the finished run.

        It is None where the run has steps left, or its newest checkpoint is another one.
        """
        result = self.folder.find(TrainingResult, self.folder.result)
        if (
            result is None
            and self.folder.summary.exists()
            and not self.folder.result.exists()
        ):
            log.warning(
                "%s is missing, although the run has a summary.", self.folder.result
            )
        if (
            result is None
            or not self.committed
            or result.steps != self.committed[0].step
        ):
            return None
        if not result.is_final(
            self.max_steps, self.lineage.train.early_stopping_patience
        ):
            return None
        if result.checkpoint_digest != self.committed[0].digest:
            log.warning(
                "%s is not of the checkpoint of its step; the run is not taken for finished.",
                self.folder.result,
            )
            return None
        return result

    @property
    def last_line(self) -> int:
        """The step of the last line of metrics.jsonl; 0 without one."""
        return self.trained[-1].step if self.trained else 0

    @cached_property
    def step(self) -> int:
        """The last completed step, by metrics.jsonl or by the newest checkpoint."""
        newest = self.committed[0].step if self.committed else 0
        return max(self.last_line, newest)

    @property
    def max_steps(self) -> int:
        return self.lineage.max_steps

    @cached_property
    def environment(self) -> EnvironmentRecord | None:
        """The record of patch-environment; None where it was removed or is damaged."""
        return self.folder.find(EnvironmentRecord, self.folder.environment)

    @cached_property
    def dataset(self) -> DatasetManifests | None:
        """The manifests of its dataset; None where the dataset was moved, removed or damaged."""
        dataset = self.lineage.dataset
        folder = self.folder.dataset(dataset.path)
        try:
            manifests = DatasetManifests(
                tokens=read_dataset(folder),
                rows=read_row_table(folder / ROW_TABLES / dataset.row_table),
            )
            digests = (manifests.tokens.digest, manifests.rows.digest)
            if digests != (dataset.digest, dataset.row_table_digest):
                raise Damaged(
                    f"{folder} is not the dataset that the run was trained on."
                )
            return manifests
        except Damaged as fault:
            if folder.is_dir():  # else it was moved or removed
                log.warning("%s The report leaves out the dataset's manifests.", fault)
            return None

    @cached_property
    def checkpoints(self) -> list[CheckpointFacts]:
        """The facts of the committed checkpoints, newest first."""
        best = checkpoints.best_of(self.committed)
        return [
            CheckpointFacts(
                name=checkpoint.path.name,
                step=checkpoint.step,
                validation_loss=checkpoint.validation_loss,
                bytes=size_of(checkpoint.path),
                latest=number == 0,
                best=checkpoint.path == best,
            )
            for number, checkpoint in enumerate(self.committed)
        ]

    @cached_property
    def goodput(self) -> Goodput:
        return goodput(self.folder)

    @cached_property
    def evaluations(self) -> list[EvaluationLine]:
        """Measurements of the run's model by `evaluate`, the oldest first."""
        lines = read_lines(
            self.folder.evaluations, EVALUATION_LINE, self.folder.read_id()
        )
        # The file is made with its first line.
        if self.folder.evaluations.exists() and not lines:
            log.warning(
                "%s has no measurement any more: what it had is lost.",
                self.folder.evaluations,
            )
        return lines

    @property
    def missing_evaluations(self) -> list[JsonValue]:
        """Kinds in evaluate.after_training that the finished run's checkpoint has no result of."""
        listed = dotted(self.config).get("evaluate.after_training")
        if not self.result or not isinstance(listed, list):
            return []
        newest = self.committed[0].digest
        lines = [
            line
            for line in self.evaluations
            if line.asked and line.asked.digest == newest
        ]
        measured = [
            "perplexity" if isinstance(line, PerplexityLine) else "passkey"
            for line in lines
        ]
        measured += (
            [EXPORT] if has_all_files(self.folder.export, EXPORT, newest) else []
        )
        return [kind for kind in listed if kind not in measured]

    @cached_property
    def samples(self) -> list[SampleLine]:
        """Texts by the model: those of samples.jsonl, and, last, the finished model's.

        There is a warning where samples.jsonl lacks some.
        """
        written = read_lines(self.folder.samples, SampleLine, self.folder.read_id())
        # The texts of a finished attempt's last step are in the result.
        ends = {attempt.step for attempt in self.attempts if attempt.kind == "done"}
        validated = {line.step for line in self.validated if 0 < line.step < self.step}
        present = {line.step for line in written}
        for steps, train in self._trained_with:
            if train.sample_prompts != []:
                due = {step for step in validated if step in steps}
                _warn_of_missing(
                    self.folder.samples, "text of step", due - ends - present
                )
        texts = self.result.samples if self.result else ()
        written = [line for line in written if not line.given_up]
        return written + [SampleLine(step=self.step, text=text) for text in texts]

    @cached_property
    def state(self) -> str:
        """The word finished or running, or how the last attempt ended."""
        if self.result:
            return "finished"
        if lock_holder(self.folder.lock) is not None:
            return "running"
        if not self.attempts:
            return "killed" if attempt_folders(self.folder) else "not begun"
        last = self.attempts[-1]
        begun = max(map(number_of, attempt_folders(self.folder)), default=0)
        if last.attempt < begun:
            return "killed"
        if last.kind == "preempted":
            return "stopped"
        return f"failed ({last.code})" if last.code else "to finish"

    @cached_property
    def results(self) -> RunResults:
        """The run's results so far, in numbers."""
        last = self.validated[-1] if self.validated else None
        train_losses = (
            line.loss for line in reversed(self.trained) if line.loss is not None
        )
        losses = (
            line.loss for line in self.validated if line.loss is not None and line.step
        )
        step_seconds = sum(line.step_time for line in self.trained)
        read = sum(line.input_tokens for line in self.trained)
        plans = map(attempt_plan_path, attempt_folders(self.folder))
        # One of them exists: a lineage is read from its file or from a plan.
        files = [
            path
            for path in (self.folder.metrics, self.folder.lineage, *plans)
            if path.exists()
        ]
        return RunResults(
            run=self.name,
            state=self.state,
            step=self.step,
            max_steps=self.max_steps,
            dataset=self.lineage.dataset.path,
            parameters=self.result.parameters if self.result else None,
            tokens=sum(line.targets or 0 for line in self.trained),
            input_tokens=read,
            steps_without_targets=sum(line.targets == 0 for line in self.trained),
            train_loss=next(train_losses, None),
            validation_loss=last.loss if last else None,
            best_validation_loss=min(losses, default=None),
            bits_per_byte=last.bits_per_byte if last else None,
            step_seconds=step_seconds,
            tokens_per_second=read / step_seconds if step_seconds else None,
            mfu=self._mean_mfu(),
            goodput=self.goodput.share,
            seconds=self.goodput.wall,
            attempts=len(self.attempts),
            age=max(0.0, time.time() - max(path.stat().st_mtime for path in files)),
            bytes=size_of(self.path),
        )

    def _mean_mfu(self) -> float | None:
        """Mean MFU of the steps for which it was measured, weighted by their time."""
        measured = [line for line in self.trained if line.mfu is not None]
        seconds = sum(line.step_time for line in measured)
        if not seconds:
            return None
        return sum((line.mfu or 0.0) * line.step_time for line in measured) / seconds

    @cached_property
    def summary(self) -> RunSummary | None:
        """The summary of a finished run."""
        result = self.result
        if result is None:
            return None
        results = self.results
        loss = results.validation_loss
        rows = self.dataset.rows.meta if self.dataset else None
        return RunSummary(
            **dict(result),
            run=self.name,
            train_loss=results.train_loss,
            validation_loss=loss,
            validation_bits_per_token=None if loss is None else loss / math.log(2),
            unigram_entropy_bits=rows.unigram_entropy_bits if rows else None,
            bits_per_byte=results.bits_per_byte,
            best_validation_loss=results.best_validation_loss,
            tokens=results.tokens,
            input_tokens=results.input_tokens,
            seconds=results.step_seconds,
            tokens_per_second=results.tokens_per_second or 0.0,
            updates_left_out=sum(
                line.loss is None and line.targets != 0 for line in self.trained
            ),
            steps_without_targets=results.steps_without_targets,
            attempts=results.attempts,
            goodput=self.goodput,
            checkpoint=self.committed[0].path,
            paths=RunPaths(
                run=self.path,
                tensorboard=self.folder.tensorboard,
                loss_curve=self.folder.loss_curve,  # written by the caller, as the page is
                report=self.folder.report,
            ),
        )

    @property
    def description(self) -> RunDescription:
        """Progress, losses, checkpoints and attempts."""
        return RunDescription(
            run=self.name,
            finished=self.result is not None,
            dataset=self.lineage.dataset.path,
            model=self.lineage.model.to_dict(),
            step=self.step,
            train_loss=self.results.train_loss,
            validation=tuple(self.validated),
            checkpoints=tuple(self.checkpoints),
            attempts=tuple(self.attempts),
            summary=self.summary,
        )


def _is_evaluation_due(checkpoint: checkpoints.Checkpoint) -> bool:
    """Whether the next attempt begins with the evaluation of this checkpoint."""
    with suppress(Damaged):
        return checkpoints.read_state(checkpoint.path).evaluation_due
    return False


def _warn_of_missing(path: Path, what: str, numbers: set[int]) -> None:
    """Log a warning that names the first of the lines that a file of lines lacks.

    They are missing from curves, tables and totals.
    """
    if not numbers:
        return
    first = ", ".join(map(str, sorted(numbers)[:SHOWN]))
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    log.warning(
        "%s has no %s %s%s: its process failed or was killed before it wrote it, or it is lost.",
        path,
        what,
        first,
        more,
    )


def list_runs(home: Path) -> list[RunResults]:
    """The results of the runs of `home`, the one that was last worked on first."""
    runs: list[RunResults] = []
    for path in run_folders(home):
        try:
            run = RunFolder(path)
            if run.has_begun():
                runs.append(RunReader(path).results)
        except (Damaged, OSError) as fault:  # it may be another user's
            log.warning("run %s is skipped: %s", path.name, fault)
    return sorted(runs, key=lambda run: run.age)
