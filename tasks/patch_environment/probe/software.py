"""What is installed beside Python packages: compilers and allocators, and what else runs or answers here."""

import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infini_llama.tasks.patch_environment.probe.machine import Machine

LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib")
ALLOCATORS = {
    "tcmalloc": ("libtcmalloc_minimal.so*", "libtcmalloc.so*"),
    "jemalloc": ("libjemalloc.so*",),
}
HUB_SECONDS = 1.0


def compilers(machine: Machine) -> dict[str, str | None]:
    """What torch.compile builds with: {"cxx", "cc"}, the path of each or None."""
    cxx, cc = machine.environ.get("CXX", ""), machine.environ.get("CC", "")
    return {
        "cxx": machine.find(cxx or "g++") or machine.find("clang++"),
        "cc": machine.find(cc or "gcc") or machine.find("clang") or machine.find("cc"),
    }


def allocators(machine: Machine) -> dict[str, str]:
    """The memory allocators that can be preloaded, each with the path of its library; tried, since one may not fit."""
    if sys.platform != "linux":
        return {}
    folders = [machine.root / name for name in LIBRARIES] + [Path(sys.prefix, "lib")] * (machine.root == Path("/"))
    folders += [Path(name) for name in machine.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if name]
    found = {}
    for name, patterns in ALLOCATORS.items():
        paths = [path for pattern in patterns for folder in folders for path in sorted(folder.glob(pattern))]
        fitting = next((path for path in paths if "debug" not in path.name and _preloads(path, machine)), None)
        if fitting is not None:
            found[name] = str(fitting)
    return found


def _preloads(path: Path, machine: Machine) -> bool:
    """Whether the loader takes the library; it says on stderr that it does not, and goes on without."""
    preloaded = Machine(root=machine.root, environ={"LD_PRELOAD": str(path)})
    ended = preloaded.ask_python("pass", seconds=10)
    return ended.returncode == 0 and "cannot be preloaded" not in ended.stderr


def limits(machine: Machine) -> dict[str, int | None]:
    """Soft limits of this process, None for unlimited: open files, processes, bytes of a file."""
    names = {
        "Max open files": "files",
        "Max processes": "processes",
        "Max file size": "file_size",
    }
    found = re.findall(rf"^({'|'.join(names)})\s+(\S+)", machine.text("/proc/self/limits"), re.MULTILINE)
    return {names[name]: None if soft == "unlimited" else int(soft) for name, soft in found}


def other_workers(machine: Machine) -> list[dict[str, Any]]:
    """Workers of infini-llama that train here now: {"pid", "run"}."""
    found = []
    for path in sorted(machine.path("/proc").glob("[0-9]*/cmdline")):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended since
            continue
        if "infini_llama.tasks.train.worker" in words and "torch.distributed.run" not in words:
            order = Path(words[words.index("infini_llama.tasks.train.worker") + 1])
            if len(order.parents) > 3 and order.parents[1].name == "logs":
                found.append({"pid": int(path.parent.name), "run": order.parents[2].name})
    return found


def hub_answers(machine: Machine) -> bool | None:
    """Whether the Hugging Face hub accepts connections; None where the user has switched it off."""
    if machine.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return None
    url = urlsplit(machine.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    answered = threading.Event()

    def connect() -> None:
        try:
            port = url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection((url.hostname or "", port), timeout=HUB_SECONDS).close()
            answered.set()
        except OSError:
            return

    threading.Thread(target=connect, daemon=True).start()  # looking a name up has no time-out of its own
    return answered.wait(HUB_SECONDS)
