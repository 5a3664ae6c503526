"""Facts about this machine, as plain JSON. Nothing here judges, and nothing is changed."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "prefect",
    "fastapi",
    "datasets",
    "tokenizers",
    "pyarrow",
    "numpy",
    "pydantic",
    "tensorboard",
    "flash-attn",
)

# Run by a child process, so that neither torch nor a CUDA context stays in this one.
GPU_QUESTIONS = """
import json, torch
report = {"gpus": [], "cuda": torch.version.cuda, "nccl": torch.distributed.is_nccl_available()}
for index in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    with torch.cuda.device(index):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    report["gpus"].append({"name": p.name, "capability": [p.major, p.minor], "memory": total, "free": free, "bf16": bf16})
try:
    from flash_attn import flash_attn_func
    report["flash_attn"] = callable(flash_attn_func)
except Exception as error:
    report["flash_attn"] = False
    report["flash_attn_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(report))
"""


def probe(home: Path) -> dict[str, Any]:
    """Everything that `plan.resolve` decides by, and what a person would ask for after a failure."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": usable_cores(),
        "memory": memory(),
        "shared_memory": _free_bytes(Path("/dev/shm")),
        "disk": disk(home),
        "port": can_listen(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        **gpus(),
    }


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group (v2) rounded down, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def memory() -> dict[str, int]:
    """Bytes of memory in all and available, both within the limit of the control group (v2)."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    total = available = pages * size
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass  # not Linux: what is installed is all that is known
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, available = min(total, limit), min(available, max(0, limit - used))
    except (OSError, ValueError):
        pass  # no control group, or no limit ("max")
    return {"total": total, "available": available}


def disk(home: Path) -> dict[str, Any]:
    """Free bytes at `home`, and whether what a commit needs works there: write, fsync, rename of a folder."""
    home.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"path": str(home), "free": _free_bytes(home), "works": True}
    try:
        with tempfile.TemporaryDirectory(dir=home, prefix=".probe-") as scratch:
            before, after = Path(scratch, "before"), Path(scratch, "after")
            before.mkdir()
            with (before / "file").open("wb") as file:
                file.write(b"probe")
                os.fsync(file.fileno())
            before.rename(after)
    except OSError as error:
        facts |= {"works": False, "fault": error.strerror or str(error)}
    return facts


def can_listen() -> bool:
    """Whether a port of the loopback interface can be had, as torchrun's rendezvous needs."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return True
    except OSError:
        return False


def gpus() -> dict[str, Any]:
    """GPUs as torch sees them; asked only where an NVIDIA driver is present."""
    if not Path("/dev/nvidiactl").exists():
        return {"gpus": [], "nccl": False, "flash_attn": False}
    child = subprocess.run([sys.executable, "-c", GPU_QUESTIONS], capture_output=True, text=True, check=False)
    if child.returncode:
        fault = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return {"gpus": [], "nccl": False, "flash_attn": False, "gpu_fault": fault}
    return json.loads(child.stdout.splitlines()[-1])


def _free_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
