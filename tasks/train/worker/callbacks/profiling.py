"""train.profile_steps: torch's profiler over a few steps."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger("infini_llama.worker")
MOST_ROWS = 40


class Profiler:
    """Records the steps numbered first to last; leaves a trace for chrome://tracing or Perfetto and a table of the costliest functions.

    Args:
        folder: becomes `rank-R.trace.json.gz` and `rank-R.txt`.
        span: of `train.profile_steps`; None: nothing is recorded.
    """

    def __init__(self, folder: Path, span: list[int] | None, rank: int) -> None:
        self.folder, self.span, self.rank = folder, span, rank
        self.running: profile | None = None

    def before(self, step: int) -> None:
        """Called before step number `step` begins."""
        if self.span is not None and self.running is None and self.span[0] <= step <= self.span[1]:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.running = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)
            self.running.start()

    def after(self, step: int, last: bool) -> None:
        """Called when step number `step` is done; `last`: no other follows."""
        if self.running is None or self.span is None or (step < self.span[1] and not last):
            return
        self.running.stop()
        self.folder.mkdir(exist_ok=True)
        self.running.export_chrome_trace(str(self.folder / f"rank-{self.rank}.trace.json.gz"))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self.running.key_averages().table(sort_by=order, row_limit=MOST_ROWS)
        (self.folder / f"rank-{self.rank}.txt").write_text(table, encoding="utf-8")
        log.info("profile of steps %d to %d is in %s", self.span[0], step, self.folder)
        self.running = None
