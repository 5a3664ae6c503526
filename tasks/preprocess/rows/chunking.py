"""The chunk level: a table that says where each row of a split begins, computed with numpy or, on a GPU, with torch."""

import logging
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from infini_llama.configs.errors import ConfigError

log = logging.getLogger("infini_llama.preprocess")
DEVICES = Path("/dev")
GPU_ROWS = 1 << 26  # from so many rows on data.device=auto uses a GPU: starting CUDA takes seconds, numpy half a second


def row_count(tokens: int, sequence_length: int, stride: int | None = None) -> int:
    """How many rows there are that begin every `stride` tokens (of 'concat', every sequence_length) and are whole.

    A row reads one token more than sequence_length, the label of its last input; what is left at the end is shorter than a row.
    Hence row i covers tokens [i stride, i stride + sequence_length + 1).
    """
    return max(0, (tokens - 1 - sequence_length) // (stride or sequence_length) + 1)


def row_starts(count: int, step: int) -> np.ndarray:
    """First tokens, int64 [count], of rows that begin every `step` tokens."""
    return np.arange(count, dtype=np.int64) * step


def resolve_device(wanted: str) -> str:
    """auto is the first GPU where the driver shows one, else the CPU. torch is not imported to find out.

    Raises:
        ConfigError: a GPU is requested by name, and there is none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    has_gpu = (DEVICES / "nvidiactl").exists() and visible != "" and not visible.startswith(("-1", ","))
    if wanted.startswith("cuda") and not has_gpu:
        raise ConfigError(
            f"data.device={wanted}, but this machine has no working NVIDIA driver; use data.device=auto or cpu."
        )
    if wanted == "auto":
        return "cuda:0" if has_gpu else "cpu"
    return wanted


def compute_starts(count: int, step: int, device: str, required: bool) -> tuple[np.ndarray, str]:
    """`row_starts`, with the same bytes on any device, and the device that computed them.

    Args:
        required: whether the device was requested by name. If not, a GPU computes large tables only, and numpy takes over where it
            fails.

    Returns:
        the starts, and the devices that computed them.

    Raises:
        ConfigError: a device that was requested by name does not work.
    """
    if device == "cpu" or (count < GPU_ROWS and not required):
        return row_starts(count, step), "cpu"
    try:  # in a process of its own, so that no CUDA context stays beside training
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(row_starts_by_torch, count, step, device).result(), device
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if required:
            raise ConfigError(
                f"data.device: {device} does not work ({reason}); use data.device=auto or cpu."
            ) from error
        log.warning(
            "computing row tables on %s failed (%s); the CPU is used instead, with the same result", device, reason
        )
        return row_starts(count, step), "cpu"


def row_starts_by_torch(count: int, step: int, device: str) -> np.ndarray:
    import torch

    return torch.arange(count, dtype=torch.int64, device=device).mul_(step).cpu().numpy()
