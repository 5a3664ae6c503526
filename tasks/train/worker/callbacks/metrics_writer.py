"""The files metrics.jsonl (every step) and samples.jsonl (the texts of every evaluation), and the curves of some steps."""

import math
import os
from collections import deque
from pathlib import Path
from typing import TextIO

import numpy as np

from infini_llama.configs.reading import changed
from infini_llama.tasks.records.metrics import SampleLine, StepLine, StepTimeSpread, TrainLine, ValidationLine
from infini_llama.tasks.runs.run_folder import run_id
from infini_llama.tasks.storage.json_lines import with_checksum
from infini_llama.tasks.train.worker.callbacks.reporters import Reporter

Curves = list[tuple[str, float | None]]
MOST_HEADS = 64  # of a model whose gates are curves of their own
RECENT = 200  # steps over whose times the percentiles are computed
# Groups of curves; a field in none of them is in metrics.jsonl alone.
TRAIN = ("loss", "learning_rate", "grad_norm", "param_norm", "loss_scale")
SYSTEM = ("tokens_per_second", "mfu", "step_time", "data_time", "save_time", "memory_peak")
VALIDATION = ("loss", "bits_per_byte")


class MetricsWriter:
    """Appends to metrics.jsonl and samples.jsonl (already cut back by the supervisor) and passes curves to the reporters."""

    def __init__(self, run_dir: Path, log_every: int, reporters: list[Reporter]) -> None:
        self.metrics = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self.texts = (run_dir / "samples.jsonl").open("a", encoding="utf-8")
        self.log_every, self.reporters, self.run_id = log_every, reporters, run_id(run_dir) or ""
        self.times: deque[float] = deque(maxlen=RECENT)
        self.last_validation: dict[str, float] = {}

    def train(self, line: TrainLine) -> None:
        self.times.append(line.step_time)
        if line.step % self.log_every:
            self._append(self.metrics, line)
            return
        p50, p90, p99 = np.percentile(self.times, (50, 90, 99)).tolist()
        spread = StepTimeSpread(p50=p50, p90=p90, p99=p99)
        self._append(self.metrics, changed(line, step_time_spread=spread))
        curves = _group("train", line, TRAIN) + _group("system", line, SYSTEM)
        curves += [(f"system/step_time_{name}", value) for name, value in spread]
        curves += [(f"goodput/{part}", seconds) for part, seconds in line.goodput or ()]
        curves += [(f"gates/layer-{layer}", gate) for layer, gate in enumerate(line.layer_gates)]
        if sum(map(len, line.gate_heads)) <= MOST_HEADS:
            for layer, heads in enumerate(line.gate_heads):
                curves += [(f"gate-heads/layer-{layer}-head-{head}", gate) for head, gate in enumerate(heads)]
        curves += [(f"custom/{name}", value) for name, value in line.custom.items()]
        self._report(curves, line.step)

    def validation(self, line: ValidationLine) -> None:
        self._append(self.metrics, line)
        self.last_validation = self._report(_group("validation", line, VALIDATION), line.step)
        curves = [(f"memory-reads/layer-{layer}", size) for layer, size in enumerate(line.memory_reads)]
        self._report(
            [*curves, *((f"memory-norms/layer-{layer}", size) for layer, size in enumerate(line.memory_norms))],
            line.step,
        )

    def samples(self, step: int, prompts: list[str], texts: list[str]) -> None:
        for prompt, text in zip(prompts, texts, strict=True):
            self._append(self.texts, SampleLine(step=step, prompt=prompt, text=text))
        for reporter in self.reporters:
            reporter.texts("samples", texts, step)

    def sync(self) -> None:
        """Flush every line so far to disk: a checkpoint must not survive the metrics that led to it."""
        for file in (self.metrics, self.texts):
            os.fsync(file.fileno())
        for reporter in self.reporters:
            reporter.sync()

    def close(self, finished: bool) -> None:
        """Close files and reporters; a finished run reports its last validation as its result."""
        self.metrics.close()
        self.texts.close()
        for reporter in self.reporters:
            reporter.close(self.last_validation if finished else {})

    def _report(self, curves: Curves, step: int) -> dict[str, float]:
        """Those that are finite, once they are reported."""
        drawn = {name: value for name, value in curves if value is not None and math.isfinite(value)}
        for reporter in self.reporters:
            reporter.scalars(drawn, step)
        return drawn

    def _append(self, file: TextIO, line: StepLine) -> None:
        file.write(
            with_checksum(line.model_dump_json(exclude_unset=True), self.run_id) + "\n"
        )  # null for numbers that JSON cannot represent
        file.flush()


def _group(group: str, line: StepLine, names: tuple[str, ...]) -> Curves:
    return [(f"{group}/{name}", getattr(line, name)) for name in names]
