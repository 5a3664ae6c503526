"""Reporting of a run: metrics.jsonl, samples.jsonl and curves.

metrics.jsonl has every step, samples.jsonl the texts of every evaluation but the last, whose texts
are in result.json. The curves have some steps; they are drawn by TensorBoard and Weights & Biases,
under the same names.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import json
import math
import os
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import JsonObject, changed, dotted
from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.records.metrics import (
    SampleLine,
    StepLine,
    StepTimeSpread,
    TrainLine,
    ValidationLine,
    metrics_of,
)
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.runs.run_folder import RunFolder, read_metrics
from infini_llama.tasks.storage.record_files import with_checksum, write_record
from infini_llama.tasks.train.worker.callbacks.reporting import (
    CLOSE_SECONDS,
    REPORTING,
    SYNC_SECONDS,
    Reporter,
    ReporterThread,
    put_and_wait,
)

Curves = list[tuple[str, float | None]]
MOST_HEADS = 64  # of a model whose gates are curves of their own
RECENT = 200  # steps over whose times the percentiles are computed


class WandbRecord(Record):
    """wandb.json of a run.

    Attributes:
        folder: the run's absolute path; that of a copy is another one.
        step: the last one sent.
    """

    id: str
    folder: str
    step: int = -1


class Sample(NamedTuple):
    """A text by the model; it begins with the prompt."""

    prompt: str
    text: str


class TensorBoard:
    """Event files in `tensorboard` of the run's folder."""

    def __init__(self, run_dir: Path, first_step: int, config: JsonObject) -> None:
        # Not above: the import takes 0.2 s, for which workers that write no curves need not wait.
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier attempt wrote beyond the checkpoint this one starts from.
        self.board = SummaryWriter(
            RunFolder(run_dir).tensorboard, purge_step=first_step + 1
        )
        self.settings = flat(config)
        if first_step == 0:
            text = f"```json\n{json.dumps(config, indent=1)}\n```"
            self.board.add_text("configuration", text, 0)

    def scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def texts(self, name: str, texts: list[str], step: int) -> None:
        blocks = [f"```\n{text}\n```" for text in texts]
        self.board.add_text(name, "\n\n".join(blocks), step)

    def sync(self) -> None:
        self.board.flush()

    def close(self, final: dict[str, float]) -> None:
        if final:
            metrics = {f"final/{name}": value for name, value in final.items()}
            self.board.add_hparams(self.settings, metrics, run_name=".")
        self.board.close()


class WeightsAndBiases:
    """One W&B run per training run, over all its attempts.

    `wandb.json` of the run's folder has its id and the last step sent. A step that is repeated is
    not sent again, since W&B takes only later steps: after a crash its numbers are bitwise equal,
    after a rollback the curve keeps those of before. A copy of the run's folder has a W&B run of
    its own.
    """

    def __init__(self, run_dir: Path, config: JsonObject) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                "train.report_to has wandb, but it is not installed; "
                "run pip install 'infini-llama[wandb]', or remove it."
            ) from error
        run = RunFolder(run_dir.absolute())
        self.file = run.wandb
        self.sent = _wandb_record(run)
        # Before W&B creates its run: an attempt that ends inside init resumes that run instead of
        # creating another.
        write_record(self.file, self.sent)
        try:
            self.run = wandb.init(
                project="infini-llama",
                id=self.sent.id,
                name=run_dir.name,
                resume="allow",
                dir=run_dir,
                config=config,
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ConfigError(
                f"train.report_to has wandb, but it cannot start ({error}); "
                "log in with `wandb login`, or set environment.env.WANDB_MODE=offline."
            ) from error
        self.waiting: dict[str, Any] = {}
        self.sent_before = self.sent.step
        self.step = self.sent.step

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._add(values, step)

    def texts(self, name: str, texts: list[str], step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        table = wandb.Table(columns=["text"], data=[[text] for text in texts])
        self._add({name: table}, step)

    def sync(self) -> None:
        """Send what was collected; W&B's own process persists it."""
        self.send()

    def send(self) -> None:
        """Send what was collected to W&B, once: its step is recorded first."""
        if self.waiting:
            self.sent = changed(self.sent, step=self.step)
            write_record(self.file, self.sent)
            self.run.log(self.waiting, step=self.step)
            self.waiting = {}

    def close(self, final: dict[str, float]) -> None:
        self.send()
        self.run.summary.update(
            {f"final/{name}": value for name, value in final.items()}
        )
        self.run.finish()

    def _add(self, values: Mapping[str, Any], step: int) -> None:
        """Collect what belongs to one step.

        W&B merges what one process sends of a step, and takes no more of it from a later process.
        """
        if step <= self.sent_before:
            return
        if step != self.step:
            self.send()
        self.step = step
        self.waiting |= values


def _wandb_record(run: RunFolder) -> WandbRecord:
    """The record of this run's W&B run; a new one if it has none, or is the copy of another run."""
    stored = run.find(WandbRecord, run.wandb)
    if stored is None or _is_copied(stored, run):
        return WandbRecord(id=uuid.uuid4().hex[:8], folder=str(run.path))
    return changed(stored, folder=str(run.path))


def _is_copied(stored: WandbRecord, run: RunFolder) -> bool:
    """Whether the run's record is that of another folder, which has it still.

    A run that was moved, or restored from a mirror, keeps its name.
    """
    other = RunFolder(Path(stored.folder))
    if other.path.name != run.path.name:
        return True
    of_other = other.find(WandbRecord, other.wandb)
    has_same_id = of_other is not None and of_other.id == stored.id
    return has_same_id and not other.path.samefile(run.path)


def reporters(
    names: Sequence[str],
    run_dir: Path,
    first_step: int,
    config: JsonObject,
    longest_wait: float,
) -> list[ReporterThread]:
    """The reporters that `train.report_to` names.

    An attempt continues without one that cannot start, unless the run begins and the user has to
    correct something.

    Args:
        longest_wait: seconds that training may wait for one of them.

    Raises:
        ConfigError: the run begins, and W&B is requested without its package or a login.
    """
    makers: list[tuple[str, Callable[[], Reporter]]] = []
    if "tensorboard" in names:
        makers.append(("TensorBoard", lambda: TensorBoard(run_dir, first_step, config)))
    if "wandb" in names:
        makers.append(("Weights & Biases", lambda: WeightsAndBiases(run_dir, config)))
    started = [ReporterThread(name, create, longest_wait) for name, create in makers]
    return [one for one in started if _is_used(one, run_begins=first_step == 0)]


def _is_used(reporter: ReporterThread, run_begins: bool) -> bool:
    """Whether the reporter has started; if not, there was a warning.

    Raises:
        ConfigError: the run begins, and the user has to correct something.
    """
    to_correct = (ConfigError,) if run_begins else ()
    with best_effort(f"reporting to {reporter.name}", REPORTING, raised=to_correct):
        return reporter.has_started()
    return False


def flat(config: JsonObject) -> dict[str, bool | int | float | str]:
    """The settings by dotted keys; what is not a number becomes text."""
    settings = dotted(config).items()
    return {
        key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in settings
    }


class MetricsWriter:
    """Appends to metrics.jsonl and samples.jsonl, and passes curves to the reporters.

    The supervisor has already cut back both files.
    """

    def __init__(
        self, run_dir: Path, logging_steps: int, reporters: Sequence[ReporterThread]
    ) -> None:
        self.run = RunFolder(run_dir)
        self.metrics = self.run.metrics.open("a", encoding="utf-8")
        self.texts = self.run.samples.open("a", encoding="utf-8")
        self.logging_steps = logging_steps
        self.reporters = [*reporters]
        self.run_id = self.run.read_id()
        self.times: deque[float] = deque(maxlen=RECENT)
        self.last_validation: dict[str, float] = {}

    def has_validation(self, step: int) -> bool:
        """Whether metrics.jsonl has the validation after `step`; reads all of it."""
        lines = read_metrics(self.run)
        return any(
            isinstance(line, ValidationLine) and line.step == step for line in lines
        )

    def train(self, line: TrainLine) -> None:
        self.times.append(line.step_time)
        if line.step % self.logging_steps:
            self._append(self.metrics, line)
            return
        p50, p90, p99 = np.percentile(self.times, (50, 90, 99)).tolist()
        spread = StepTimeSpread(p50=p50, p90=p90, p99=p99)
        self._append(self.metrics, changed(line, step_time_spread=spread))
        curves = _curves(line)
        curves += [(f"system/step_time_{name}", value) for name, value in spread]
        curves += [(f"goodput/{part}", seconds) for part, seconds in line.goodput or ()]
        curves += [
            (f"gates/layer-{layer}", gate)
            for layer, gate in enumerate(line.layer_gates)
        ]
        if sum(map(len, line.gates)) <= MOST_HEADS:
            curves += [
                (f"gate-heads/layer-{layer}-head-{head}", gate)
                for layer, heads in enumerate(line.gates)
                for head, gate in enumerate(heads)
            ]
        curves += [(f"custom/{name}", value) for name, value in line.custom.items()]
        self._report(curves, line.step)

    def validation(self, line: ValidationLine) -> None:
        self._append(self.metrics, line)
        self.last_validation = self._report(_curves(line), line.step)
        for group, sizes in (
            ("memory-reads", line.memory_reads),
            ("memory-norms", line.memory_norms),
        ):
            memory = [
                (f"{group}/layer-{layer}", size) for layer, size in enumerate(sizes)
            ]
            self._report(memory, line.step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for prompt, text in samples:
            self._append(self.texts, SampleLine(step=step, prompt=prompt, text=text))
        if samples:
            texts = [sample.text for sample in samples]
            for reporter in self.reporters:
                reporter.put(lambda reporter: reporter.texts("samples", texts, step))

    def give_up_samples(self, step: int) -> None:
        """Record that there are no texts of this step."""
        self._append(self.texts, SampleLine(step=step, text="", given_up=True))

    def sync(self) -> None:
        """Flush every line so far to disk.

        A checkpoint must not survive the metrics that led to it.
        """
        for file in (self.metrics, self.texts):
            os.fsync(file.fileno())
        timely = [reporter for reporter in self.reporters if not reporter.is_late]
        put_and_wait(timely, lambda reporter: reporter.sync(), SYNC_SECONDS)

    def close(self) -> None:
        """Close the files."""
        self.metrics.close()
        self.texts.close()

    def close_reporters(self, finished: bool) -> None:
        """Wait for the reporters; a finished run reports its last validation as its result."""
        final = self.last_validation if finished else {}
        put_and_wait(
            self.reporters, lambda reporter: reporter.close(final), CLOSE_SECONDS
        )

    def _report(self, curves: Curves, step: int) -> dict[str, float]:
        """Report the curves that are finite at this step, and return them."""
        drawn = {
            name: value
            for name, value in curves
            if value is not None and math.isfinite(value)
        }
        for reporter in self.reporters:
            reporter.put(lambda reporter: reporter.scalars(drawn, step))
        return drawn

    def _append(self, file: TextIO, line: StepLine) -> None:
        # JSON has null for numbers that it cannot represent.
        text = line.model_dump_json(exclude_unset=True)
        file.write(with_checksum(text, self.run_id) + "\n")
        file.flush()


def _curves(line: StepLine) -> Curves:
    """The metrics of a line that are a curve each; the others are in metrics.jsonl alone."""
    return [
        (f"{metric.group}/{name}", getattr(line, name))
        for name, metric in metrics_of(type(line)).items()
        if metric.group
    ]
