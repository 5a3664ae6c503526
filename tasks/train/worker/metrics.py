"""What a run reports: metrics.jsonl with every step, TensorBoard with some. Only the first rank writes."""

import json
import math
import os
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class Metrics:
    """Appends to `metrics.jsonl` (already cut back to `first_step` by the supervisor) and to TensorBoard."""

    def __init__(self, run_dir: Path, first_step: int, log_every: int) -> None:
        self.file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        # purge_step hides what an earlier attempt wrote beyond the checkpoint this one starts from
        self.board = SummaryWriter(run_dir / "tensorboard", purge_step=first_step + 1)
        self.log_every = log_every

    def train(self, record: dict) -> None:
        self._append({"kind": "train", **record})
        if record["step"] % self.log_every == 0:
            for name in ("loss", "learning_rate", "grad_norm"):
                if record[name] is not None:
                    self.board.add_scalar(f"train/{name}", record[name], record["step"])
            for name in ("tokens_per_second", "step_time", "data_time", "save_time"):
                self.board.add_scalar(f"system/{name}", record[name], record["step"])
            for part, seconds in record["goodput"].items():
                self.board.add_scalar(f"goodput/{part}", seconds, record["step"])
            for layer, gate in enumerate(record.get("gates", [])):
                self.board.add_scalar(f"gates/layer-{layer}", gate, record["step"])

    def validation(self, record: dict) -> None:
        self._append({"kind": "validation", **record})
        for name in ("loss", "bits_per_byte"):
            if math.isfinite(record[name]):
                self.board.add_scalar(f"validation/{name}", record[name], record["step"])

    def sync(self) -> None:
        """Puts every line so far on the disk: a checkpoint must not survive the metrics that led to it."""
        os.fsync(self.file.fileno())
        self.board.flush()

    def close(self) -> None:
        self.file.close()
        self.board.close()

    def _append(self, record: dict) -> None:
        whole = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self.file.write(json.dumps(whole, allow_nan=False) + "\n")
        self.file.flush()
