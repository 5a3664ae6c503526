"""Facts about this machine, as plain JSON. Nothing here judges, and nothing is changed."""

import os
import platform
import shutil
import socket
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasks.patch_environment.gpus import gpus
from tasks.patch_environment.limits import memory, usable_cores

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


def probe(home: Path) -> dict[str, Any]:
    """Everything that `plan.resolve` decides by, and what a person would ask for after a failure."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu(),
        "cores": usable_cores(),
        "memory": memory(),
        "shared_memory": _free_bytes(Path("/dev/shm")),
        "disk": disk(home),
        "port": can_listen(),
        "loopback": loopback(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        **gpus(),
    }


def cpu() -> dict[str, Any]:
    """{"model", "bf16"}: the processor's name, and whether it multiplies bf16 itself (AMX or AVX-512)."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass  # not Linux
    flags = fields.get("flags", fields.get("Features", "")).split()
    bf16 = any(flag in flags for flag in ("amx_bf16", "avx512_bf16", "bf16"))
    return {"model": fields.get("model name", platform.machine()), "bf16": bf16}


def disk(home: Path) -> dict[str, Any]:
    """Free bytes at `home`, and whether what a commit needs works there: write, fsync, rename of a folder.

    A home that does not exist yet is not made: the folder that it would be made in is tried.
    """
    folder = next(path for path in (home.absolute(), *home.absolute().parents) if path.exists())
    facts: dict[str, Any] = {"path": str(folder), "free": _free_bytes(folder), "works": True}
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".probe-") as scratch:
            before, after = Path(scratch, "before"), Path(scratch, "after")
            before.mkdir()
            with (before / "file").open("wb") as file:
                file.write(b"probe")
                file.flush()
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


def loopback() -> str | None:
    """The name of the loopback interface, where there is one."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


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
