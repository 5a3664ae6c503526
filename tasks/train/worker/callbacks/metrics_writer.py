"""The files metrics.jsonl (every step) and samples.jsonl (the texts of every evaluation), and the curves of some steps."""

import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from infini_llama.tasks.train.worker.callbacks.reporters import Reporter

PERCENTILES = (50, 90, 99)
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
        self.log_every, self.reporters = log_every, reporters
        self.times: deque[float] = deque(maxlen=RECENT)
        self.last_validation: dict[str, float] = {}

    def train(self, record: dict[str, Any]) -> None:
        self.times.append(record["step_time"])
        if record["step"] % self.log_every:
            self._append(self.metrics, {"kind": "train", **record})
            return
        spread = {
            f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(self.times, PERCENTILES), strict=True)
        }
        self._append(self.metrics, {"kind": "train", **record, "step_time_spread": spread})
        curves = _group("train", record, TRAIN) | _group("system", record, SYSTEM)
        curves |= {f"system/step_time_{name}": value for name, value in spread.items()}
        curves |= {f"goodput/{part}": seconds for part, seconds in record["goodput"].items()}
        curves |= {f"gates/layer-{layer}": gate for layer, gate in enumerate(record.get("gates", []))}
        curves |= {f"custom/{name}": value for name, value in record.get("custom", {}).items()}
        self._report(curves, record["step"])

    def validation(self, record: dict[str, Any]) -> None:
        self._append(self.metrics, {"kind": "validation", **record})
        curves = _group("validation", record, VALIDATION)
        self.last_validation = {name: value for name, value in curves.items() if math.isfinite(value)}
        self._report(curves, record["step"])

    def samples(self, step: int, prompts: list[str], texts: list[str]) -> None:
        for prompt, text in zip(prompts, texts, strict=True):
            self._append(self.texts, {"step": step, "prompt": prompt, "text": text})
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

    def _report(self, curves: dict[str, float], step: int) -> None:
        drawn = {name: value for name, value in curves.items() if math.isfinite(value)}
        for reporter in self.reporters:
            reporter.scalars(drawn, step)

    def _append(self, file: Any, record: dict[str, Any]) -> None:
        file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
        file.flush()


def _group(group: str, record: dict[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    return {f"{group}/{name}": record[name] for name in names if record.get(name) is not None}


def _finite(value: Any) -> Any:
    """With null for numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
