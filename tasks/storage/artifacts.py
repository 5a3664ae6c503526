"""The one commit protocol for directories: units, datasets, row tables, checkpoints and exports.

Stage under a temporary name beside the target, write the files, write the manifest last, sync
everything, rename. A folder without a valid manifest does not exist for a reader; a folder with one
was whole when it was committed.
"""

import errno
import itertools
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from blake3 import blake3
from pydantic import ValidationError

from infini_llama.configs.errors import PASSING, DataError
from infini_llama.configs.reading import JsonObject
from infini_llama.tasks.records.manifest import (
    AnyManifest,
    DatasetManifest,
    FileEntry,
    Manifest,
    RowTableManifest,
    UnitManifest,
)
from infini_llama.tasks.records.record import first_fault
from infini_llama.tasks.storage.files import sync, temporary_name

MANIFEST = "manifest.json"
SELF_CHECKSUM = "self_checksum"  # of the other fields of a JSON file
EXPORT = "export"
ROW_TABLES = "chunks"  # their kind, and their folder inside a dataset
FORMAT_VERSIONS = {
    "unit": 4,
    "dataset": 2,
    ROW_TABLES: 1,
    "checkpoint": 3,
    EXPORT: 1,
}
# The answers of filesystems without links: exFAT, network filesystems, folders that a virtual
# machine shares.
NO_LINKS = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# Answers for a file that may be whole.
NOT_NOW = (errno.EACCES, errno.EPERM, *PASSING)
READ_AT_ONCE = 2**21  # bytes
log = logging.getLogger("infini_llama.artifacts")
Read = TypeVar("Read", bound=Manifest)


class Damaged(DataError):
    """An artifact is not what its manifest says; the message names the file and the fault."""


class OtherVersion(Damaged):
    """An artifact is of a format version that this program does not read.

    For what can be built again, that is as if it were damaged.
    """


def _serialized(manifest: Mapping[str, object]) -> bytes:
    return json.dumps(manifest, indent=1, ensure_ascii=False).encode()


def checksum_of(value: Any) -> str:
    """Checksum of a JSON value, independent of key order and whitespace."""
    text = json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    )
    canonical = text.encode("utf-8", "surrogatepass")  # a file's name may be no UTF-8
    return "blake3:" + blake3(canonical).hexdigest()


def key_of(value: Any) -> str:
    """64 hexadecimal digits for a JSON value: the key of what it determines."""
    return checksum_of(value).removeprefix("blake3:")


def file_checksum(path: Path) -> str:
    """Checksum of a file's bytes, by several threads where it is large.

    Read, not mapped: as fast, and a disk that fails raises OSError where a memory map ends the
    process by SIGBUS.
    """
    digest = blake3(max_threads=blake3.AUTO)
    buffer = memoryview(bytearray(READ_AT_ONCE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return "blake3:" + digest.hexdigest()


def staging(target: Path) -> Path:
    """A fresh empty folder beside `target`, under a name that no reader looks at."""
    folder = temporary_name(target)
    folder.mkdir(parents=True)
    return folder


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A folder from `staging`, deleted at the end of the block unless it was committed.

    After a kill it stays. The next build removes that of a dataset or a row table; `gc` removes
    that of anything.
    """
    folder = staging(target)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _files_below(folder: Path) -> list[Path]:
    """Every file and link of an artifact, relative to it.

    Those of the artifacts nested in it are left out.
    """
    relatives = []
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if Path(root, name).is_symlink()]
        relatives += [Path(root, name).relative_to(folder) for name in [*files, *links]]
        if Path(root) == folder and ROW_TABLES in folders and ROW_TABLES not in links:
            folders.remove(ROW_TABLES)
    return sorted(relatives)


def commit(
    staged_folder: Path,
    target: Path,
    kind: str,
    meta: Mapping[str, object],
    content: Mapping[str, object] | None = None,
    computed: Mapping[str, str] | None = None,
) -> AnyManifest:
    """Turn the staged folder into the artifact `target`, all of it or nothing.

    Args:
        staged_folder: a folder from `staging`, with every file written.
        target: where a concurrent builder has committed the same bytes and content, theirs is kept
            and the staged one dropped; anything else that has this name is moved aside.
        kind: what the artifact is: a key of FORMAT_VERSIONS.
        meta: when, from what, by whom; not part of the digest.
        content: facts that the bytes determine; part of the digest.
        computed: checksums by relative path, of files whose writers computed them on the way; the
            others are read for theirs.

    Returns:
        the manifest; its digest proves bytes and content.
    """
    files = {}
    for relative in _files_below(staged_folder):
        file = staged_folder / relative
        size = file.stat().st_size
        checksum = (computed or {}).get(relative.as_posix()) or file_checksum(file)
        files[relative.as_posix()] = FileEntry(size=size, checksum=checksum).to_json()
    fields = {
        "kind": kind,
        "format_version": FORMAT_VERSIONS[kind],
        "files": files,
        "content": content or {},
    }
    digest = checksum_of(fields)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    fields |= {
        "digest": digest,
        "created": created,
        "meta": meta,
    }
    fields[SELF_CHECKSUM] = checksum_of(fields)
    (staged_folder / MANIFEST).write_bytes(_serialized(fields))
    return publish(staged_folder, target, AnyManifest.model_validate(fields))


def publish(
    staged_folder: Path,
    target: Path,
    manifest: AnyManifest,
) -> AnyManifest:
    """Give a complete staged folder the name of its artifact, once all of it is on the disk.

    Returns:
        the manifest of the artifact that has the name, see `commit`.
    """
    try:
        # Onto an existing artifact, which is never empty, this fails.
        rename_synced(staged_folder, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        try:
            existing = check(target, manifest.kind, checksums=True)
            fault = f"{target} has digest {existing.digest}, and {manifest.digest} was written."
        except Damaged as damaged:
            existing = None
            fault = str(damaged)
        if existing is not None and existing.digest == manifest.digest:
            remove(staged_folder)
            return existing
        log.warning("%s It was moved to %s and replaced.", fault, move_aside(target))
        rename_synced(staged_folder, target)
    return manifest


def rename_synced(folder: Path, target: Path) -> None:
    """Give a folder another name in the same parent, once all of it is on the disk.

    Raises:
        OSError: `target` is a file, or a folder that is not empty.
    """
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(root, name))
        sync(Path(root))
    folder.rename(target)
    sync(target.parent)


def read_manifest(path: Path, kind: str, key: str | None = None) -> AnyManifest:
    """The manifest of the artifact at `path`.

    Args:
        key: under which it must have been built; None: any.

    Raises:
        Damaged: there is none, or it is not whole, of another kind or key, of an unknown format, or
            names files outside the folder.
    """
    return _read(path, kind, key, AnyManifest)


def read_dataset(path: Path) -> DatasetManifest:
    """The manifest of the token level at `path`; see `read_manifest`."""
    return _read(path, "dataset", None, DatasetManifest)


def read_unit(path: Path, key: str) -> UnitManifest:
    """The manifest of the unit at `path`; see `read_manifest`."""
    return _read(path, "unit", key, UnitManifest)


def read_row_table(path: Path) -> RowTableManifest:
    """The manifest of the row table at `path`; see `read_manifest`."""
    return _read(path, ROW_TABLES, None, RowTableManifest)


def _read(
    path: Path,
    kind: str,
    key: str | None,
    form: type[Read],
) -> Read:
    file = path / MANIFEST
    if not os.path.lexists(file):
        raise Damaged(f"{path} has no {MANIFEST}, so it was never finished.")
    fields = _fields_of(file)
    try:
        manifest = AnyManifest.model_validate(fields)
        if manifest.kind != kind:
            raise Damaged(f"{path} is a {manifest.kind}, not a {kind}.")
        if manifest.format_version != FORMAT_VERSIONS[kind]:
            raise OtherVersion(
                f"{path} has format version {manifest.format_version} of {kind}, and this program "
                f"reads {FORMAT_VERSIONS[kind]}; use the version of infini-llama that wrote it, or "
                "build it again."
            )
        stored = manifest.meta.get("key")
        if key is not None and stored != key:
            raise Damaged(
                f"{path} holds a {kind} with key {stored}; the key of this name is {key}."
            )
        for name in manifest.files:
            path_in_folder = PurePosixPath(name)
            if (
                path_in_folder.is_absolute()
                or ".." in path_in_folder.parts
                or "\0" in name
            ):
                raise Damaged(f"{file} names {name!r}, which lies outside its folder.")
        digested = {
            name: fields[name]
            for name in ("kind", "format_version", "files", "content")
        }
        if manifest.digest != checksum_of(digested):
            raise Damaged(
                f"{file} has digest {manifest.digest}, which is not that of its files and content."
            )
        return form.model_validate(fields)
    except ValidationError as fault:
        raise Damaged(f"{file}: {first_fault(fault)}.") from None


def _fields_of(file: Path) -> JsonObject:
    """The fields of a manifest whose bytes match its own checksum.

    Their types are not checked yet.
    """
    with readable(file):
        text = file.read_bytes()
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict) or SELF_CHECKSUM not in fields:
            raise Damaged(f"{file} is not a manifest.")
        others = {key: value for key, value in fields.items() if key != SELF_CHECKSUM}
        checksum = checksum_of(others)
        # Values can survive a flipped bit (1e-5 and 1E-5, the last digit of a long number), so the
        # bytes are compared too.
        if fields[SELF_CHECKSUM] != checksum or _serialized(fields) != text:
            raise Damaged(f"{file} does not match its own checksum.")
        if fields.keys() != Manifest.model_fields.keys():
            raise OtherVersion(
                f"{file} has fields of another version of infini-llama; use the version that wrote "
                "it, or build it again."
            )
    except (ValueError, RecursionError):
        raise Damaged(f"{file} is not JSON.") from None
    return fields


def check(
    path: Path,
    kind: str,
    checksums: bool | Collection[str],
    key: str | None = None,
) -> AnyManifest:
    """The manifest, once every file is there at its size.

    Other files may be there as well, such as a user's notes or .DS_Store: no reader opens them.

    Args:
        checksums: whether the files' bytes are read and compared; or the names of those that are.

    Raises:
        Damaged: names the first file that differs.
    """
    manifest = read_manifest(path, kind, key)
    for name, expected in manifest.files.items():
        file = path / name
        is_read = checksums if isinstance(checksums, bool) else name in checksums
        if file.is_symlink() or not file.is_file():
            raise Damaged(f"{file} is missing.")
        with readable(file):
            size = file.stat().st_size
        if size != expected.size:
            raise Damaged(
                f"{file} has {size} bytes; its manifest says {expected.size}."
            )
        if is_read:
            verify_checksum(file, expected.checksum)
    return manifest


def verify_checksum(file: Path, checksum: str) -> None:
    """Compare the bytes of a file with the checksum in its manifest.

    Raises:
        Damaged: they differ, or cannot be read.
    """
    with readable(file):
        actual = file_checksum(file)
    if actual != checksum:
        raise Damaged(
            f"{file} does not have the bytes its manifest says (checksum differs)."
        )


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """A block that reads a file: one that the disk cannot give is damaged.

    One that cannot be had just now (limits, permissions, a file server) is not.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NOT_NOW:
            raise
        raise Damaged(f"{file} cannot be read ({error.strerror}).") from None


def has_all_files(path: Path, kind: str, key: str | None = None) -> bool:
    """Whether `check` without checksums passes.

    The manifest is then whole, and every file is there at its size.
    """
    try:
        check(path, kind, checksums=False, key=key)
    except Damaged:
        return False
    return True


def set_pointer(folder: Path, name: str, target_name: str) -> None:
    """Make `folder/name` a relative link to `target_name`, replaced as a whole.

    It does nothing on a disk without links, or that is only read.

    For people: programs scan. The temporary name is always the same, so that the next call takes
    away what a kill left; of two calls at once one wins. A folder in the link's place, which a copy
    without links makes (`cp -rL`, object storage), is moved aside.
    """
    temporary = folder / f".{name}.tmp"
    link = folder / name
    _move_copy_aside(link)
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target_name)
        temporary.replace(link)
    except OSError as error:
        is_expected = error.errno in (
            errno.EEXIST,
            errno.ENOENT,
            errno.EROFS,
            *NO_LINKS,
        )
        if not is_expected or not folder.is_dir():
            raise


def remove_pointer(folder: Path, name: str) -> None:
    """Remove the link `folder/name`, if there is one; a folder in its place is moved aside."""
    _move_copy_aside(folder / name)
    (folder / name).unlink(missing_ok=True)


def _move_copy_aside(link: Path) -> None:
    """Move aside a folder that is in the place of a link."""
    if not link.is_dir() or link.is_symlink():
        return
    try:
        aside = move_aside(link)
    except FileNotFoundError:  # another process has moved it
        return
    log.warning(
        "%s is a folder, a copy of what a link led to; it was renamed %s and can be deleted.",
        link,
        aside.name,
    )


def move_aside(path: Path) -> Path:
    """Rename a damaged artifact so that no reader finds it; nothing is deleted."""
    names = (
        path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1)
    )
    return path.rename(next(aside for aside in names if not aside.exists()))


def row_tables(dataset: Path) -> list[Path]:
    """The row tables of a dataset.

    Those that `move_aside` has renamed, or a person who followed the advice of `verify`, are left
    out.
    """
    return [
        path
        for path in sorted((dataset / ROW_TABLES).glob("[!.]*"))
        if path.is_dir() and ".damaged" not in path.name
    ]


def remove(path: Path) -> None:
    """Delete an artifact under a name that no reader looks at: a half-deleted one is never seen.

    What cannot be deleted now is left to `gc`: NFS keeps a file that another process reads, and a
    folder with one. Of an artifact that was moved elsewhere behind a link, the link is deleted.
    """
    if path.is_symlink():
        path.unlink()
        return
    trash = temporary_name(path)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)
