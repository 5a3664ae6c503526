"""Facts about this machine, without its GPUs: processor, memory, disk, compilers, packages.

Nothing is changed. All readings go through `Machine`.
"""

import importlib.metadata
import platform
import re
import resource
import socket
import tempfile
from pathlib import Path

from infini_llama.tasks.machine import Machine
from infini_llama.tasks.records.machine import Compilers, Cpu, Disk, Folder
from infini_llama.tasks.runs.run_folder import RunFolder, size_of
from infini_llama.tasks.storage.filesystem import examine

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
)
# Variables that set how threads of OpenMP wait for each other.
THREAD_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# Variables that set which freed memory glibc keeps.
GLIBC_MEMORY = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
)
# Variables that set how torch divides a GPU's memory.
CUDA_MEMORY = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
MEMORY_TUNABLE = re.compile(
    r"\bglibc\.malloc\.(mmap_max|mmap_threshold|trim_threshold|top_pad)="
)
# File systems where flock may not reach other machines, and renames and listings may lag.
NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "lustre",
    "beegfs",
    "ceph",
    "glusterfs",
    "fuse.sshfs",
    "fuse.gcsfuse",
    "fuse.s3fs",
    "afs",
)


def cpu(machine: Machine) -> Cpu:
    """The processor's name, and whether it multiplies bf16 in hardware."""
    fields: dict[str, str] = {}
    for line in machine.text("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    bf16 = any(flag in flags for flag in ("amx_bf16", "avx512_bf16", "bf16"))
    model = fields.get("model name", platform.machine())
    return Cpu(model=model, bf16=bf16, amx="amx_bf16" in flags)


def load(machine: Machine) -> float:
    """Number of processes that need a core.

    That is the last minute's average, or those of this moment except this one, whichever is lower:
    stages of this pipeline that have just ended count in the average only.
    """
    words = machine.text("/proc/loadavg").split()
    if len(words) < 4:
        return 0.0
    average = float(words[0])
    running_now = float(words[3].split("/")[0])
    return min(average, running_now - 1)


def exported(machine: Machine) -> tuple[str, ...]:
    """Names of exported variables that a plan does not replace.

    GLIBC_TUNABLES counts only with a tunable of memory; its other settings stand beside the plan's.
    """
    names = [
        name
        for name in (*THREAD_WAITING, *GLIBC_MEMORY, *CUDA_MEMORY)
        if name in machine.environ
    ]
    if not MEMORY_TUNABLE.search(machine.environ.get("GLIBC_TUNABLES", "")):
        names = [name for name in names if name != "GLIBC_TUNABLES"]
    return tuple(names)


def disk(home: Path, machine: Machine, run: str | None = None) -> Disk:
    """The file system of `home`, and what it lacks.

    Args:
        run: name of the run whose checkpoints are counted.
    """
    tried = examine(home)
    kind = _file_system(tried.folder, machine)
    written = tried.folder
    run_bytes = 0
    if run:
        checkpoints = RunFolder(home / "runs" / run).checkpoints
        # Any of these folders may be a link to another disk.
        written = next(filter(Path.exists, (checkpoints, *checkpoints.parents)))
        run_bytes = size_of(checkpoints)
    return Disk(
        path=str(tried.folder),
        free=free_bytes(written, machine),
        fault=tried.fault,
        has_links=tried.has_links,
        kind=kind,
        network=kind in NETWORK,
        run_bytes=run_bytes,
    )


def _file_system(folder: Path, machine: Machine) -> str:
    """The kind of file system that `folder` is on, such as ext4; "" if unknown."""
    kinds: dict[str, str] = {}
    for line in machine.text("/proc/self/mounts").splitlines():
        _, escaped, kind, *_ = line.split(" ")
        mount_point = re.sub(
            r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), escaped
        )
        kinds[mount_point] = kind
    for path in (folder.resolve(), *folder.resolve().parents):
        if str(path) in kinds:
            return kinds[str(path)]
    return ""


def free_bytes(path: Path, machine: Machine) -> int | None:
    """Free bytes of the file system of `path`; None if there is none."""
    try:
        return machine.free_bytes(path)
    except OSError:
        return None


def limit_of(kind: int) -> int | None:
    """A limit of this process, such as `resource.RLIMIT_NOFILE`; None: there is none."""
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


def shared_memory_fault(machine: Machine) -> str:
    """The fault of /dev/shm, where processes have their semaphores.

    "" if all works, or if there is no such folder.
    """
    folder = machine.path("/dev/shm")
    return examine(folder).fault if folder.exists() else ""


def folders(machine: Machine) -> tuple[Folder, ...]:
    """Folders that libraries write to, each named by a variable."""
    named = {
        name: machine.environ[name]
        for name in ("HOME", "PREFECT_HOME")
        if machine.environ.get(name)
    }
    tried = [
        Folder(setting=name, path=path, fault=examine(Path(path)).fault)
        for name, path in named.items()
    ]
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        return (
            *tried,
            Folder(setting="TMPDIR", path="none", fault=error.strerror or str(error)),
        )
    return (
        *tried,
        Folder(setting="TMPDIR", path=str(temporary), fault=examine(temporary).fault),
    )


def compilers(machine: Machine) -> Compilers:
    """The compilers that torch.compile uses."""
    cxx = machine.environ.get("CXX", "") or "g++"
    cc = machine.environ.get("CC", "") or "gcc"
    return Compilers(
        cxx=machine.find(cxx) or machine.find("clang++"),
        cc=machine.find(cc) or machine.find("clang") or machine.find("cc"),
    )


def is_port_free(port: int) -> bool:
    """Whether this port of the loopback interface is available."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return True
    except OSError:
        return False


def loopback_fault() -> str:
    """Reason why this machine does not reach itself at the loopback address; "" if it does."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def versions() -> dict[str, str]:
    """Versions of the installed ones of `PACKAGES`."""
    installed: dict[str, str] = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed
