"""train.profile_steps: torch's profiler over a few steps."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.train.worker.callbacks.callback import Callback, StepResult

log = logging.getLogger("infini_llama.worker")
MOST_ROWS = 40


class Profiler(Callback):
    """Records the steps numbered first to last; leaves a trace for chrome://tracing or Perfetto and a table of the costliest functions.

    Args:
        folder: becomes `rank-R.trace.json.gz` and `rank-R.txt`.
        span: of `train.profile_steps`; None: nothing is recorded.
    """

    def __init__(self, folder: Path, span: list[int] | None, rank: int) -> None:
        self.folder, self.span, self.rank = folder, span, rank
        self.running: profile | None = None

    def on_step_start(self, state: TrainState) -> None:
        if self.span is not None and self.running is None and self.span[0] <= state.step + 1 <= self.span[1]:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.running = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)
            self.running.start()

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if self.running is None or self.span is None:
            return
        if state.step >= self.span[1]:
            self._write(f"steps {self.span[0]} to {state.step}")

    def on_train_end(self, finished: bool) -> None:
        if self.running is not None and self.span is not None:
            self._write(f"the steps from {self.span[0]} on")

    def _write(self, steps: str) -> None:
        assert self.running is not None
        self.running.stop()
        self.folder.mkdir(exist_ok=True)
        self.running.export_chrome_trace(str(self.folder / f"rank-{self.rank}.trace.json.gz"))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self.running.key_averages().table(sort_by=order, row_limit=MOST_ROWS)
        (self.folder / f"rank-{self.rank}.txt").write_text(table, encoding="utf-8")
        log.info("profile of %s is in %s", steps, self.folder)
        self.running = None
