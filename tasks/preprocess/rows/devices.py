"""Which device computes the rows of a table: numpy's, or a GPU in a process of its own."""

import multiprocessing
import os
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.rows.packing import PACKED, ComputeRows, RowArrays, compute_rows

DEVICES = Path("/dev")
ON_A_GPU = ("concat", "window", "padded", "greedy")  # the strategies that `tensors` computes


def resolve_device(requested: str, strategy: str) -> str:
    """The device that computes row tables: the requested one for strategies ON_A_GPU; the CPU for others, and for auto.

    A GPU works in a process of its own, so that no CUDA context stays beside training. To return a table of concat from that process
    took 4.6 times as long as numpy takes for all of it at 67 million rows, and 6 times at 134 million (2 busy cores, without CUDA's
    start). What packs has not been timed on a GPU.

    Raises:
        ConfigError: a GPU is requested, and there is none. torch is not imported to find out.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    has_gpu = (DEVICES / "nvidiactl").exists() and visible != "" and not visible.startswith(("-1", ","))
    if requested.startswith("cuda") and not has_gpu:
        raise ConfigError(
            f"data.device={requested}, but this machine has no working NVIDIA driver; use data.device=auto or cpu."
        )
    return "cpu" if requested == "auto" or strategy not in ON_A_GPU else requested


@contextmanager
def rows_on(device: str) -> Generator[ComputeRows]:
    """`compute_rows` on a device, with the same bytes on any; a GPU's process ends with the context.

    Raises:
        ConfigError: from the function: the device does not work.
    """
    if device == "cpu":
        yield compute_rows
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:

        def on_device(lengths: np.ndarray, strategy: str, sequence_length: int, stride: int | None) -> RowArrays:
            if strategy not in PACKED:
                lengths = lengths.sum(keepdims=True)  # all that such rows depend on
            try:
                return pool.submit(rows_by_torch, lengths, strategy, sequence_length, stride, device).result()
            except Exception as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ConfigError(
                    f"data.device: {device} does not work ({reason}); use data.device=auto or cpu."
                ) from error

        yield on_device


def rows_by_torch(
    lengths: np.ndarray, strategy: str, sequence_length: int, stride: int | None, device: str
) -> RowArrays:
    """`tensors.compute_rows`; only the process that computes imports torch."""
    from infini_llama.tasks.preprocess.rows import tensors

    return tensors.compute_rows(lengths, strategy, sequence_length, stride, device)
