"""The chunk level: a table that says where each row of a split begins, computed with numpy or, on GPUs, with torch."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np

from infini_llama.configs.errors import ConfigError

log = logging.getLogger("infini_llama.preprocess")
DEVICES = Path("/dev")


def row_count(tokens: int, sequence_length: int, stride: int | None = None) -> int:
    """How many rows there are that begin every `stride` tokens (of 'concat', every sequence_length) and are whole.

    A row reads one token more than sequence_length, the label of its last input; what is left at the end is shorter than a row.
    Hence row i covers tokens [i stride, i stride + sequence_length + 1).
    """
    return max(0, (tokens - 1 - sequence_length) // (stride or sequence_length) + 1)


def row_starts(count: int, step: int) -> np.ndarray:
    """First tokens, int64 [count], of rows that begin every `step` tokens."""
    return np.arange(count, dtype=np.int64) * step


def resolve_devices(wanted: str) -> list[str]:
    """auto is the first GPU where the driver shows one, else the CPU; all is every GPU, else the CPU. torch is not imported to find out.

    Raises:
        ConfigError: a GPU is asked for by name, and there is none.
    """
    gpus = _gpus()
    if wanted.startswith("cuda"):
        if not gpus:
            raise ConfigError(
                f"data.device={wanted}, but no NVIDIA driver answers on this machine; use data.device=auto or cpu."
            )
        return [wanted]
    if wanted == "cpu" or not gpus:
        return ["cpu"]
    return [f"cuda:{number}" for number in range(gpus if wanted == "all" else 1)]


def _gpus() -> int:
    """How many GPUs a process of this environment sees."""
    if not (DEVICES / "nvidiactl").exists():
        return 0
    there = len([path for path in DEVICES.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    names = takewhile(lambda name: name not in ("", "-1"), map(str.strip, visible.split(",")))  # CUDA reads no further
    return min(there, len([*names]))


def compute_starts(count: int, step: int, devices: list[str], required: bool) -> tuple[np.ndarray, list[str]]:
    """`row_starts`, each device an equal share of consecutive rows at the same time; the same bytes on any.

    GPU work runs in child processes, so that no CUDA context stands beside training later.

    Args:
        required: whether the devices were asked for by name; if they were not and one fails, numpy does the work, and a line says so.

    Returns:
        the starts, and the devices that computed them.

    Raises:
        ConfigError: a device that was asked for by name does not work.
    """
    if devices == ["cpu"]:
        return row_starts(count, step), devices
    shares = [(device, count * k // len(devices), count * (k + 1) // len(devices)) for k, device in enumerate(devices)]
    with ThreadPoolExecutor(len(shares)) as pool:
        children = [*pool.map(partial(_child, step), shares)]
    for device, child in zip(devices, children, strict=True):
        if child.returncode == 0:
            continue
        reason = (child.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        if required:
            raise ConfigError(f"data.device: {device} does not work ({reason}); use data.device=auto or cpu.")
        log.warning("chunking on %s failed (%s); the CPU does it, with the same bytes", device, reason)
        return row_starts(count, step), ["cpu"]
    return np.concatenate([np.frombuffer(child.stdout, dtype=np.int64) for child in children]), devices


def _child(step: int, share: tuple[str, int, int]) -> subprocess.CompletedProcess[bytes]:
    device, first, last = share
    command = [
        sys.executable,
        "-m",
        "infini_llama.tasks.preprocess.rows.chunking_torch",
        device,
        str(first),
        str(last),
        str(step),
    ]
    return subprocess.run(command, capture_output=True, check=False)
