"""The chunk level: a table that says where each row of a split begins, computed with numpy or, on a GPU, with torch."""

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np

from configs.errors import ConfigError

log = logging.getLogger("infini_llama.preprocess")


def row_starts(tokens: int, sequence_length: int) -> np.ndarray:
    """First tokens, int64 [rows], of the rows of 'concat': the stream cut every `sequence_length` tokens.

    A row reads one token more than that, the label of its last input; what is left at the end is shorter than a row.
    Hence row i covers tokens [i L, i L + L + 1).
    """
    return np.arange((tokens - 1) // sequence_length, dtype=np.int64) * sequence_length


def window_starts(tokens: int, sequence_length: int, stride: int) -> np.ndarray:
    """First tokens, int64 [rows], of rows that begin every `stride` tokens and have all their sequence_length + 1 tokens."""
    return np.arange((tokens - 1 - sequence_length) // stride + 1, dtype=np.int64) * stride


def resolve_device(wanted: str) -> str:
    """auto is the first GPU where the driver shows one, else the CPU; torch is not imported to find out."""
    has_gpu = Path("/dev/nvidiactl").exists()
    if wanted.startswith("cuda") and not has_gpu:
        raise ConfigError(
            f"data.device={wanted}, but no NVIDIA driver answers on this machine; use data.device=auto or cpu."
        )
    if wanted == "auto":
        return "cuda:0" if has_gpu else "cpu"
    return wanted


def compute_rows(tokens: int, sequence_length: int, device: str, required: bool) -> np.ndarray:
    """`row_starts`, on the given device; the same bytes on each.

    GPU work runs in a child process, so that no CUDA context stands beside training later.

    Args:
        required: whether the device was asked for by name; if it was not and fails, numpy does the work, and a line says so.

    Raises:
        ConfigError: the device that was asked for by name does not work.
    """
    if device == "cpu":
        return row_starts(tokens, sequence_length)
    command = [sys.executable, "-m", "tasks.preprocess.chunking_torch", device, str(tokens), str(sequence_length)]
    child = subprocess.run(command, capture_output=True, check=False)
    if child.returncode == 0:
        return np.frombuffer(child.stdout, dtype=np.int64)
    reason = (child.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    if required:
        raise ConfigError(f"data.device={device} does not work ({reason}); use data.device=auto or cpu.")
    log.warning("chunking on %s failed (%s); the CPU does it, with the same bytes", device, reason)
    return row_starts(tokens, sequence_length)
