"""What a run's folder says of it, while it goes on as well as afterwards; nothing is judged and no tensor is read."""

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.records.goodput import Goodput
from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.goodput import goodput
from infini_llama.tasks.runs.run_folder import (
    EvaluationLine,
    RunFolder,
    SampleLine,
    attempt_folders,
    attempts,
    number_of,
    read_metrics,
)
from infini_llama.tasks.storage.artifacts import Damaged, read_manifest
from infini_llama.tasks.storage.json_lines import read_lines
from infini_llama.tasks.storage.locks import lock_holder
from infini_llama.tasks.storage.sizes import size_of


@dataclass(frozen=True)
class RunRecord:
    """The records of the run in folder `path`; each file is read once.

    Raises:
        ConfigError: it is the folder of no run.
    """

    path: Path

    def __post_init__(self) -> None:
        if not self.folder.lineage.exists():
            raise ConfigError(
                f"{self.path} is not a run folder (it has no lineage.json); give the path of runs/<name> in your "
                "home folder."
            )

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
    def config(self) -> dict[str, Any]:
        path = self.path / "config.yaml"
        try:
            config = yaml.safe_load(path.read_bytes()) if path.exists() else None
        except (yaml.YAMLError, ValueError, RecursionError):
            config = None
        return config if isinstance(config, dict) and "train" in config else {"train": self.lineage.train}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder)

    @property
    def trained(self) -> list[dict[str, Any]]:
        return [record for record in self.metrics if record["kind"] == "train"]

    @property
    def validated(self) -> list[dict[str, Any]]:
        return [record for record in self.metrics if record["kind"] == "validation"]

    @cached_property
    def attempts(self) -> list[AttemptRecord]:
        return attempts(self.folder)

    @cached_property
    def result(self) -> dict[str, Any]:
        """What the finished run left; {} where it has not ended, or goes on beyond the steps it ended with before."""
        result = self.folder.read_or_rebuild(self.path / "result.json")
        return result if result.get("steps") == self.step else {}

    @cached_property
    def step(self) -> int:
        return self.trained[-1]["step"] if self.trained else 0

    @property
    def max_steps(self) -> int:
        return self.lineage.max_steps

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What patch-environment recorded; {} for a run of `train` called as a function, with a plan of its caller's."""
        return self.folder.read_or_rebuild(self.path / "environment.json")

    @cached_property
    def dataset(self) -> dict[str, Any]:
        """The manifests of its dataset, {"tokens", "rows"}; {} where the dataset was moved, removed or damaged."""
        dataset = self.lineage.dataset
        folder = self.path.parent.parent / dataset.path
        with suppress(Damaged):
            tokens = read_manifest(folder, "dataset").to_json()
            return {"tokens": tokens, "rows": read_manifest(folder / "chunks" / dataset.chunks, "chunks").to_json()}
        return {}

    @cached_property
    def checkpoints(self) -> list[dict[str, Any]]:
        """The committed ones, newest first."""
        folder = self.folder.checkpoints
        best = checkpoints.best(folder)
        found = checkpoints.losses(folder)
        return [
            {
                "name": path.name,
                "step": checkpoints.step_of(path),
                "validation_loss": loss,
                "bytes": size_of(path),
                "is": " ".join(["latest"] * (path == next(iter(found))) + ["best"] * (path == best)),
            }
            for path, loss in found.items()
        ]

    @cached_property
    def goodput(self) -> Goodput:
        return goodput(self.folder)

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """What `evaluate` and `passkey` measured of its model, the oldest first."""
        return read_lines(self.path / "evaluations.jsonl", EvaluationLine)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Texts by the model: [{"step", "text"}], those of samples.jsonl and, last, the finished model's."""
        texts = [self.result["sample"], *self.result.get("samples", [])] if self.result else []
        return read_lines(self.folder.samples, SampleLine) + [{"step": self.step, "text": text} for text in texts]

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
