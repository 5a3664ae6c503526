"""The one commit protocol for directories, used by datasets and by checkpoints.

Stage under a temporary name beside the target, write the files, write the manifest last, sync everything, rename. A folder
without a valid manifest does not exist for a reader; a folder with one is whole.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from blake3 import blake3

from configs.errors import DataError, PipelineError

MANIFEST = "manifest.json"
FORMAT_VERSIONS = {"dataset": 1, "chunks": 1, "checkpoint": 1}
NESTED = "chunks"  # a folder of artifacts of its own inside a dataset


class Damaged(DataError):
    """An artifact is not what its manifest says; the message names the file and the fault."""


class Busy(PipelineError):
    """Somebody else holds the lock; the message says who."""


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def checksum_of(value: Any) -> str:
    """Checksum of a JSON value, independent of key order and white space."""
    return "blake3:" + blake3(_canonical(value)).hexdigest()


def file_checksum(path: Path) -> str:
    """Checksum of a file's bytes, read through a memory map by several threads where it is large."""
    digest = blake3(max_threads=blake3.AUTO)
    if path.stat().st_size:
        digest.update_mmap(path)
    return "blake3:" + digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str) -> None:
    """Replaces `path` with `text` as a whole: a reader sees the old content or the new, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def staging(target: Path) -> Path:
    """A fresh empty folder beside `target`, under a name that no reader looks at."""
    folder = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    folder.mkdir(parents=True)
    return folder


def _files_below(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name != NESTED or path.parent != folder:
                found += [path / below for below in _files_below(path)]
        else:
            found.append(path)
    return [path.relative_to(folder) for path in found]


def commit(
    staged: Path, target: Path, kind: str, format_version: int, meta: dict, content: dict | None = None
) -> dict[str, Any]:
    """Turns the staged folder into the artifact `target`, all of it or nothing.

    Args:
        staged: a folder from `staging`, with every file written.
        target: must not exist; where a concurrent builder committed it first, theirs is kept and the staged one dropped.
        kind: what the artifact is: dataset, chunks or checkpoint.
        format_version: version of its layout.
        meta: when, from what, by whom; not part of the digest.
        content: facts that the bytes determine; part of the digest.

    Returns:
        the manifest; its "digest" proves bytes and content.
    """
    files = {}
    for relative in _files_below(staged):
        size = (staged / relative).stat().st_size
        files[relative.as_posix()] = {"size": size, "checksum": file_checksum(staged / relative)}
    proven = {"kind": kind, "format_version": format_version, "files": files, "content": content or {}}
    manifest = proven | {
        "digest": checksum_of(proven),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "meta": meta,
    }
    manifest["self_checksum"] = checksum_of(manifest)
    with (staged / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, ensure_ascii=False)
    for relative in [*files, MANIFEST]:
        _sync(staged / relative)
    for folder in sorted({(staged / relative).parent for relative in [*files, MANIFEST]}):
        _sync(folder)
    try:
        staged.rename(target)  # onto an existing artifact, which is never empty, this fails
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        existing = check(target, kind, checksums=False)
        remove(staged)
        return existing
    _sync(target.parent)
    return manifest


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """The manifest of the artifact at `path`.

    Raises:
        Damaged: there is none, or it is not whole, of another kind, of an unknown format, or names files outside the folder.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{path} has no {MANIFEST}, so it was never finished.") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{file} cannot be read: {error}.") from None
    if not isinstance(manifest, dict) or "self_checksum" not in manifest:
        raise Damaged(f"{file} is not a manifest.")
    if manifest["self_checksum"] != checksum_of(
        {key: value for key, value in manifest.items() if key != "self_checksum"}
    ):
        raise Damaged(f"{file} does not match its own checksum.")
    if manifest["kind"] != kind:
        raise Damaged(f"{path} is a {manifest['kind']}, not a {kind}.")
    if manifest["format_version"] != FORMAT_VERSIONS[kind]:
        raise Damaged(
            f"{path} has format version {manifest['format_version']} of {kind}, and this program reads {FORMAT_VERSIONS[kind]}; "
            "use the version of infini-llama that wrote it, or build it again."
        )
    for name in manifest["files"]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise Damaged(f"{file} names '{name}', which lies outside its folder.")
    return manifest


def check(path: Path, kind: str, checksums: bool) -> dict[str, Any]:
    """The manifest, once every file is there at its size (and, with `checksums`, with its bytes) and no other file is.

    Raises:
        Damaged: names the first file that differs.
    """
    manifest = read_manifest(path, kind)
    for name, expected in manifest["files"].items():
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise Damaged(f"{file} is missing.")
        if (size := file.stat().st_size) != expected["size"]:
            raise Damaged(f"{file} has {size} bytes; its manifest says {expected['size']}.")
        if checksums and file_checksum(file) != expected["checksum"]:
            raise Damaged(f"{file} does not have the bytes its manifest says (checksum differs).")
    for relative in _files_below(path):
        if relative.as_posix() not in manifest["files"] and relative.as_posix() != MANIFEST:
            raise Damaged(f"{path / relative} is not in the manifest.")
    return manifest


def is_complete(path: Path, kind: str) -> bool:
    """Whether `check` without checksums passes."""
    try:
        check(path, kind, checksums=False)
    except Damaged:
        return False
    return True


def set_pointer(folder: Path, name: str, target_name: str) -> None:
    """Makes `folder/name` a relative link to `target_name`, replaced as a whole. For people: programs scan."""
    temporary = folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    temporary.symlink_to(target_name)
    temporary.replace(folder / name)


def move_aside(path: Path) -> Path:
    """Renames a damaged artifact so that no reader finds it; nothing is deleted."""
    for number in range(1, 10_000):
        aside = path.with_name(f"{path.name}.damaged-{number}")
        if not aside.exists():
            path.rename(aside)
            return aside
    raise PipelineError(f"{path} has been moved aside 10,000 times; remove some of {path}.damaged-*.")


def remove(path: Path) -> None:
    """Deletes an artifact under a name that no reader looks at: a half-deleted one is never seen."""
    trash = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    path.rename(trash)
    shutil.rmtree(trash)


class Lock:
    """An exclusive `flock` on a file, freed by the kernel when the last process that holds its descriptor ends.

    Args:
        path: created where it does not exist; never deleted.
        wait: seconds to wait for another holder.

    Raises:
        Busy: on entering, when another process still holds it; names host and process.
    """

    def __init__(self, path: Path, wait: float = 0.0) -> None:
        self.path, self.wait = path, wait

    def __enter__(self) -> "Lock":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + self.wait
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(self.fd, 4096, 0).decode(errors="replace").strip() or "an unknown process"
                    os.close(self.fd)
                    raise Busy(
                        f"{self.path} is held by another process: {holder}. Wait until it ends, or stop it, and run the same command again."
                    ) from None
                time.sleep(0.1)
        record = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, json.dumps(record).encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)
