"""Compilers and allocators, limits, other runs and the Hugging Face hub."""

import os
import re
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

from infini_llama.tasks.patch_environment.probe.machine import Machine
from infini_llama.tasks.records.machine import Compilers, Limits, RunningWorker

LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib")
ALLOCATORS = {
    "tcmalloc": ("libtcmalloc_minimal.so*", "libtcmalloc.so*"),
    "jemalloc": ("libjemalloc.so*",),
}
HUB_SECONDS = 1.0


def compilers(machine: Machine) -> Compilers:
    """The compilers that torch.compile uses."""
    cxx, cc = machine.environ.get("CXX", ""), machine.environ.get("CC", "")
    return Compilers(
        cxx=machine.find(cxx or "g++") or machine.find("clang++"),
        cc=machine.find(cc or "gcc") or machine.find("clang") or machine.find("cc"),
    )


def allocators(machine: Machine) -> dict[str, str]:
    """Libraries of the memory allocators that can be preloaded, by name; each is tried."""
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
    """Whether the loader accepts the library. If not, it prints a message and continues without it."""
    preloaded = Machine(root=machine.root, environ={"LD_PRELOAD": str(path)})
    ended = preloaded.ask_python("pass", seconds=10)
    return ended.returncode == 0 and "cannot be preloaded" not in ended.stderr


def limits(machine: Machine) -> Limits:
    """Soft limits of this process."""
    names = {"Max open files": "files", "Max processes": "processes", "Max file size": "file_size"}
    found = re.findall(rf"^({'|'.join(names)})\s+(\S+)", machine.text("/proc/self/limits"), re.MULTILINE)
    return Limits(**{names[name]: int(soft) for name, soft in found if soft != "unlimited"})


def other_workers(machine: Machine) -> tuple[RunningWorker, ...]:
    """Workers of infini-llama that train on this machine now."""
    found = []
    for path in sorted(machine.path("/proc").glob("[0-9]*/cmdline")):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended since
            continue
        if "infini_llama.tasks.train.worker" in words and "torch.distributed.run" not in words:
            given = Path(words[words.index("infini_llama.tasks.train.worker") + 1])
            if len(given.parents) > 3 and given.parents[1].name == "logs":
                found.append(RunningWorker(pid=int(path.parent.name), run=given.parents[2].name))
    return tuple(found)


def is_hub_reachable(machine: Machine) -> bool | None:
    """Whether the Hugging Face hub accepts connections; None if the user has switched it off."""
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
