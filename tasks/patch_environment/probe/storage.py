"""What a run needs of its disk, tried: write, sync, rename, free space, kind of file system, and its clock."""

import os
import re
import tempfile
from pathlib import Path

from infini_llama.configs.reading import changed
from infini_llama.tasks.patch_environment.probe.machine import Machine
from infini_llama.tasks.records.machine import Disk
from infini_llama.tasks.runs.run_folder import size_of

# Where flock may not reach other machines, and renames and listings may lag behind.
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "beegfs", "ceph", "glusterfs", "fuse.sshfs", "fuse.gcsfuse",
           "fuse.s3fs", "afs")  # fmt: skip


def disk(home: Path, machine: Machine, run: str | None = None) -> Disk:
    """The file system of `home`, and whether what a commit needs works there: write, fsync, rename of a folder.

    A home that does not exist yet is not created: the folder that it would be created in is tried.

    Args:
        run: name of the run whose checkpoints are counted.
    """
    folder = next(path for path in (home.absolute(), *home.absolute().parents) if path.exists())
    kind = file_system(folder, machine)
    facts = Disk(
        path=str(folder),
        free=free_bytes(folder, machine),
        kind=kind,
        network=kind in NETWORK,
        run_bytes=size_of(home / "runs" / run / "checkpoints") if run else 0,
    )
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".probe-") as scratch:
            before, after = Path(scratch, "before"), Path(scratch, "after")
            before.mkdir()
            with (before / "file").open("wb") as file:
                file.write(b"probe")
                file.flush()
                os.fsync(file.fileno())
            skew = round((before / "file").stat().st_mtime - machine.clock(), 1)
            before.rename(after)
    except OSError as error:
        return changed(facts, works=False, fault=error.strerror or str(error))
    return changed(facts, skew=skew)


def file_system(folder: Path, machine: Machine) -> str:
    """The kind of file system that `folder` is on, such as ext4; "" if unknown."""
    kinds = {}
    for line in machine.text("/proc/self/mounts").splitlines():
        _, point, kind, *_ = line.split(" ")
        kinds[re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point)] = kind
    above = (str(path) for path in (folder.resolve(), *folder.resolve().parents))
    return next((kinds[path] for path in above if path in kinds), "")


def free_bytes(path: Path, machine: Machine) -> int | None:
    """Free bytes of the file system of `path`; None if there is none."""
    try:
        return machine.free_bytes(path)
    except OSError:
        return None
