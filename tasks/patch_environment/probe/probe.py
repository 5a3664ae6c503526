"""Facts about this machine, as plain JSON. Nothing here judges, and nothing is changed."""

import importlib.util
import platform
import re
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from infini_llama.tasks.patch_environment.disk_space import bytes_held
from infini_llama.tasks.patch_environment.probe import software
from infini_llama.tasks.patch_environment.probe.gpus import gpus
from infini_llama.tasks.patch_environment.probe.limits import memory, usable_cores
from infini_llama.tasks.patch_environment.probe.machine import Machine
from infini_llama.tasks.patch_environment.probe.storage import disk, free_bytes

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
    "safetensors",
    "huggingface-hub",
    "transformers",
    "triton",
    "flash-attn",
    "flash-attn-4",
)
# Of this process's own, those that the plan has to build upon.
VARIABLES = ("LD_PRELOAD", "GLIBC_TUNABLES", "CUDA_VISIBLE_DEVICES")


def probe(
    home: Path, config: dict | None = None, machine: Machine | None = None, ask_hub: bool = False
) -> dict[str, Any]:
    """Everything that `plan.resolve` decides by, and what a person would ask for after a failure.

    Args:
        home: folder of datasets and runs.
        config: a port that it fixes is tried, and what its run holds on the disk is counted; None: nothing is asked for.
        machine: whose readings; None: this one's.
        ask_hub: whether the Hugging Face hub is tried, which may take a second.
    """
    machine = machine or Machine()
    port = "auto" if config is None else config["environment"]["port"]
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "glibc": platform.libc_ver()[1],
        "python": platform.python_version(),
        "cpu": cpu(machine),
        "cores": usable_cores(machine),
        "load": load(machine),
        "memory": memory(machine),
        "shared_memory": free_bytes(machine.path("/dev/shm"), machine),
        "limits": software.limits(machine),
        "disk": disk(home, machine) | ({"held": bytes_held(home, config)} if config else {}),
        "port": can_listen(0),
        "port_wished": None if port == "auto" else {"port": port, "free": can_listen(port)},
        "loopback": loopback(),
        "environment": {name: machine.environ[name] for name in VARIABLES if name in machine.environ},
        "compilers": software.compilers(machine),
        "allocators": software.allocators(machine),
        "others": software.other_workers(machine),
        "hub": software.hub_answers(machine) if ask_hub else None,
        "torch_cuda": torch_cuda(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        **gpus(machine),
    }


def cpu(machine: Machine) -> dict[str, Any]:
    """{"model", "bf16", "amx"}: the processor's name, and whether it multiplies bf16 itself, by AMX or otherwise (AVX-512, Arm)."""
    fields: dict[str, str] = {}
    for line in machine.text("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    bf16 = any(flag in flags for flag in ("amx_bf16", "avx512_bf16", "bf16"))
    return {"model": fields.get("model name", platform.machine()), "bf16": bf16, "amx": "amx_bf16" in flags}


def load(machine: Machine) -> float:
    """Processes that want a core: the last minute's average, or those right now beside this one where they are fewer.

    What this pipeline itself has just ended counts in the average, not in the latter.
    """
    words = machine.text("/proc/loadavg").split()
    if len(words) < 4:
        return 0.0
    return min(float(words[0]), float(words[3].split("/")[0]) - 1)


def can_listen(port: int) -> bool:
    """Whether this port of the loopback interface (0: any) can be had, as torchrun's rendezvous needs."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return True
    except OSError:
        return False


def loopback() -> str | None:
    """The name of the loopback interface, where there is one."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def torch_cuda() -> str | None:
    """The CUDA that torch was built for, read without importing it; None for a build without."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^cuda\b[^=]*= '([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return found[1] if found else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
