"""A run's folder as training leaves it, without the training: its dataset is real, its numbers are made up."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig, PipelineConfig
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.metrics import (
    Goodput,
    MetricsLine,
    TrainLine,
    ValidationLine,
)
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.records.summary import TrainingResult
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.runs.checkpoints import (
    KIND,
    STATE_FILE,
    checkpoint_path,
    point_and_prune,
    verify,
)
from infini_llama.tasks.runs.run_folder import RunFolder, append_attempt
from infini_llama.tasks.storage.artifacts import commit, staging
from infini_llama.tasks.train.binding import bind_run
from support.records import make_plan


def add_checkpoint(
    folder: Path, step: int, loss: float | None = None, **state: Any
) -> Path:
    """Commit a checkpoint of a kilobyte into a folder of checkpoints; `state`: fields of its train state."""
    target = checkpoint_path(folder, step)
    staged = staging(target)
    (staged / STATE_FILE).write_text(
        json.dumps(TrainState(step=step, validation_loss=loss, **state).to_json())
    )
    (staged / "weights").write_bytes(bytes(1000))
    commit(
        staged, target, KIND, meta={}, content={"step": step, "validation_loss": loss}
    )
    return target


def add_result(run: RunFolder, steps: int, **fields: object) -> None:
    """Write result.json of a run that has finished with the checkpoint of this step."""
    digest = verify(checkpoint_path(run.checkpoints, steps), checksums=False).digest
    hashes = {
        "weights_sha256": "ab12",
        "optimizer_sha256": "cd34",
        "checkpoint_digest": digest,
    }
    run.write(
        run.result,
        TrainingResult.model_validate(
            {"steps": steps, "parameters": 1234} | hashes | fields
        ),
    )


def make_run(
    home: Path,
    dataset: DatasetRef,
    data: DataConfig,
    name: str = "run",
    steps: int = 60,
    finished: bool = True,
    gates: list | None = None,
    **train: object,
) -> Path:
    """The folder of a run with three checkpoints, whose second attempt began at step 20."""
    given = {"data": data, "train": {"max_steps": 60, "warmup_steps": 5} | train}
    config = PipelineConfig.model_validate(
        given | {"runtime": {"name": name, "home": str(home)}}
    )
    run = RunFolder(home / "runs" / name)
    run.path.mkdir(parents=True)
    bind_run(config, dataset, make_plan())
    lines: list[MetricsLine] = []
    for step in range(1, steps + 1):
        line = TrainLine(
            step=step,
            loss=6.0 - step / 100,
            learning_rate=1e-3,
            grad_norm=0.5,
            tokens=step * 512,
        )
        speed = {
            "step_time": 0.5,
            "input_tokens": 512,
            "targets": 512,
            "data_time": 0.01,
            "tokens_per_second": 1024.0,
            "goodput": Goodput(),
        }
        lines.append(changed(line, gates=gates or (), **speed))
        if step % 20 == 0:
            loss = 6.1 - step / 100
            lines.append(ValidationLine(step=step, loss=loss, bits_per_byte=loss / 2))
            add_checkpoint(run.checkpoints, step, loss)
    point_and_prune(run.checkpoints, keep=3)
    run.metrics.write_text("".join(line.model_dump_json() + "\n" for line in lines))
    ends = [("failed", 70, "rank 1 ended without an error report")]
    ends += (
        [("done", 0, "finished")]
        if finished
        else [("preempted", 75, "saved a checkpoint")]
    )
    for number, (kind, code, message) in enumerate(ends, 1):
        record = AttemptRecord(
            attempt=number,
            invocation="vm-1-1",
            kind=kind,
            code=code,
            message=message,
            seconds=30.0,
        )
        append_attempt(
            run, changed(record, from_step=20 * (number - 1), checkpoint_step=20)
        )
    if finished:
        add_result(run, steps, samples=("def f(): </pre><script>", "a second text"))
    return run.path


class Reading(HTMLParser):
    """Checks that elements are closed in order, and keeps what a browser would fetch or run."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.elements: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        found = dict(attributes)
        self.fetched += [
            found[name]
            for name in ("src", "href", "xlink:href")
            if found.get(name, "#")[0] != "#"
        ]
        self.fetched += [tag] * (tag in ("script", "link", "iframe"))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] == "style":
            assert "@import" not in data and "url(" not in data.replace("url(#", "")

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())
