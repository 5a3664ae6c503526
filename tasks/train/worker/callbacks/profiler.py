"""Time and memory: torch's profiler over `train.profile_steps`, and the memory of this process."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.train.worker.callbacks.callback import (
    Callback,
    StepResult,
    Training,
)

log = logging.getLogger("infini_llama.worker")
MOST_ROWS = 40
ADVICE = "Remove train.profile_steps."


class Profiler(Callback):
    """Records the steps of `train.profile_steps`.

    It leaves a trace for chrome://tracing or Perfetto and a table of the costliest functions. They
    are written once the last of the steps is saved.

    Args:
        folder: becomes `rank-R.trace.json.gz` and `rank-R.txt`.
    """

    def __init__(self, training: Training, folder: Path) -> None:
        self.folder = folder
        self.span = training.attempt.config.train.profile_steps
        self.rank = training.ranks.rank
        self.heartbeat = training.heartbeat
        self.running: profile | None = None
        self.stopped: profile | None = None

    def on_step_start(self, state: TrainState) -> None:
        self._write()
        if self.span is None or self.running is not None:
            return
        span = self.span
        if span[0] <= state.step + 1 <= span[1]:
            self.span = None  # stays so if the profiler fails
            with best_effort("the profile", ADVICE):
                gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
                running = profile(
                    activities=[ProfilerActivity.CPU, *gpu], record_shapes=True
                )
                running.start()
                self.running = running
                self.span = span

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if self.span is not None and state.step >= self.span[1]:
            self._stop()

    def on_train_end(self) -> None:
        self._stop()
        self._write()

    def _stop(self) -> None:
        running = self.running
        self.running = None
        if running is not None:
            # A large model's takes longer than a step may.
            with self.heartbeat.during("samples"), best_effort("the profile", ADVICE):
                running.stop()
                self.stopped = running

    def _write(self) -> None:
        stopped = self.stopped
        self.stopped = None
        if stopped is None:
            return
        with self.heartbeat.during("samples"), best_effort("the profile", ADVICE):
            self.folder.mkdir(exist_ok=True)
            stopped.export_chrome_trace(
                str(self.folder / f"rank-{self.rank}.trace.json.gz")
            )
            order = (
                "self_cuda_time_total"
                if torch.cuda.is_available()
                else "self_cpu_time_total"
            )
            table = stopped.key_averages().table(sort_by=order, row_limit=MOST_ROWS)
            (self.folder / f"rank-{self.rank}.txt").write_text(table, encoding="utf-8")
            log.info("the profile is in %s", self.folder)


def memory_peak() -> int:
    """Most bytes that this process has used: of torch on a GPU, else resident."""
    sizes = memory()
    return sizes.get("gpu_most_allocated", sizes.get("most_resident", 0))


def dump_gpu_memory(path: Path) -> None:
    """Write torch's allocations on the GPU, block by block, for pytorch.org/memory_viz.

    Nothing is written without a GPU.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # The function is documented under this private name.
        torch.cuda.memory._dump_snapshot(str(path))  # pyright: ignore[reportPrivateUsage]


def memory() -> dict[str, int]:
    """Bytes of this process: resident now and at most (Linux).

    On a GPU also what torch has allocated and reserved, and what is free.
    """
    sizes = dict[str, int]()
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                key = "resident" if name == "VmRSS" else "most_resident"
                sizes[key] = int(value.split()[0]) * 1024
    except OSError:
        pass  # not Linux
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        sizes |= {
            "gpu_allocated": torch.cuda.memory_allocated(),
            "gpu_most_allocated": torch.cuda.max_memory_allocated(),
            "gpu_reserved": torch.cuda.memory_reserved(),
            "gpu_free": free,
            "gpu_total": total,
        }
    return sizes
