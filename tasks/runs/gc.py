"""Garbage of killed builds, rollbacks and old checkpoints.

It is listed first and removed on demand; what a run resumes from is never removed.

Whoever writes into a dataset or a run holds its lock, so what has a temporary name while the lock
is free is unused. Every preparation of text holds `units.lock` shared, and a unit is deleted under
it alone: so no preparation runs meanwhile.
"""

import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.runs.checkpoints import committed, prunable
from infini_llama.tasks.runs.run_folder import RunFolder, run_folders, size_of
from infini_llama.tasks.runs.start_records import start_records
from infini_llama.tasks.storage.artifacts import (
    MANIFEST,
    ROW_TABLES,
    Damaged,
    read_manifest,
    remove,
)
from infini_llama.tasks.storage.locks import Busy, Lock, lock_holder

# Names given by infini_llama.tasks.storage.artifacts.
TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")
DAMAGED = re.compile(r".+\.damaged-\d+")
OF_NO_RUN = "dataset of no run"
OLDER = "older checkpoint"
ABANDONED = "abandoned by a rollback"
MAY_BE_NEEDED = (OF_NO_RUN, OLDER, ABANDONED)  # by a run whose lineage is damaged
log = logging.getLogger("infini_llama.gc")


@dataclass(frozen=True)
class Rules:
    """Files that can be deleted.

    Attributes:
        older_than: seconds since anything was last done to it; nothing younger is deleted.
        keep_checkpoints: of each run the newest so many, beside the best and the permanent ones;
            None: all.
        unused_datasets: whether datasets that no run of this home was trained on are deleted.
    """

    older_than: float
    keep_checkpoints: int | None = None
    unused_datasets: bool = False


@dataclass(frozen=True)
class Leftover:
    """A file or folder that can be deleted.

    A process that works on its dataset or run holds `lock`, or prepares text.
    """

    path: Path
    kind: str
    lock: Path


def leftovers(home: Path, rules: Rules) -> list[Leftover]:
    """Everything that these rules allow to delete, whether or not a process uses it now.

    The needs of a run with a damaged lineage.json are unknown: its files are kept, and every
    dataset and checkpoint of the home.
    """
    lineages, damaged = _lineages(home)
    needed = {
        Path(lineage.resumed_checkpoint or lineage.resumed_from).resolve()
        for lineage in lineages.values()
        if lineage.resumed_from
    }
    used = {(home / lineage.dataset.path).resolve() for lineage in lineages.values()}
    candidates = [*_of_datasets(home, rules, used), *_of_units(home), *_of_starts(home)]
    for run in lineages:
        candidates += _of_run(RunFolder(run), rules)
    moment = time.time() - rules.older_than
    kept = MAY_BE_NEEDED if damaged else ()
    return [
        leftover
        for leftover in candidates
        if leftover.kind not in kept
        and leftover.path.resolve() not in needed
        and _older(leftover.path, moment)
    ]


def _lineages(home: Path) -> tuple[dict[Path, Lineage], dict[Path, str]]:
    """The lineage of each run, and the fault of each whose lineage is damaged, by folder."""
    lineages: dict[Path, Lineage] = {}
    damaged: dict[Path, str] = {}
    for path in run_folders(home):
        try:
            lineage = RunFolder(path).read_lineage()
            if lineage is not None:
                lineages[path] = lineage
        except (Damaged, OSError) as fault:  # it may be another user's
            damaged[path] = str(fault)
    return lineages, damaged


def _of_datasets(home: Path, rules: Rules, used: set[Path]) -> Iterator[Leftover]:
    datasets = home / "datasets"
    # A link is `latest`.
    tables = [
        path
        for path in datasets.glob(f"*/{ROW_TABLES}")
        if not path.parent.is_symlink()
    ]
    for place in (datasets, *tables):
        for path in sorted(place.glob("*")):
            owner = path if path.parent == datasets else path.parent.parent
            lock = home / "locks" / f"dataset-{_key(owner.name)}.lock"
            if TEMPORARY.fullmatch(path.name):
                yield Leftover(path, "temporary", lock)
            elif DAMAGED.fullmatch(path.name):
                yield Leftover(path, "damaged, moved aside", lock)
            elif (
                rules.unused_datasets
                and path.parent == datasets
                and _unused(path, used)
            ):
                yield Leftover(path, OF_NO_RUN, lock)


def _of_units(home: Path) -> Iterator[Leftover]:
    """Files that preparations reuse and no dataset uses: units, and reports on text and tokenizers.

    Their times are those of their last use. A unit that a dataset has stays, so that the dataset
    can be repaired. The dataset links to its files, or has copies of them on another disk.
    """
    lock = _lock_of_preparations(home)
    of_datasets = {
        checksum
        for folder in (home / "datasets").glob("*/")
        for checksum in _streams(folder, "dataset")
    }
    for path in sorted((home / "units").glob("*/*")):
        if TEMPORARY.fullmatch(path.name):
            yield Leftover(path, "temporary", lock)
        elif path.is_file() and path.parent.name in ("parts", "tokenizers"):
            yield Leftover(path, "note on text", lock)
        elif path.is_dir():
            is_linked = any(file.stat().st_nlink > 1 for file in path.glob("*.arrow"))
            if not is_linked and not of_datasets & _streams(path, "unit"):
                yield Leftover(path, "unit of no dataset", lock)


def _lock_of_preparations(home: Path) -> Path:
    """The lock of a preparation that goes on, or else the one that all of them share."""
    preparations = sorted((home / "locks").glob("prepare-*.lock"))
    readable = (path for path in preparations if os.access(path, os.R_OK))
    in_use = (path for path in readable if lock_holder(path) is not None)
    return next(in_use, home / "locks" / "units.lock")


def _of_starts(home: Path) -> Iterator[Leftover]:
    """Folders of runs that were claimed and never began, and records of starts without a folder.

    A run begins once its text is prepared.
    """
    lock = _lock_of_preparations(home)
    for run in run_folders(home):
        with suppress(PermissionError):  # it is another user's
            if not any(run.iterdir()):
                yield Leftover(run, "name of no run", lock)
    for file, start in start_records(home).items():
        if not (home / "runs" / start.name).exists():
            yield Leftover(file, "start of no run", lock)


def _streams(folder: Path, kind: str) -> set[str]:
    """Checksums of the token streams of a unit or a dataset.

    There are none where its manifest is damaged or cannot be read.
    """
    with suppress(Damaged, OSError):
        files = read_manifest(folder, kind).files
        return {
            entry.checksum for name, entry in files.items() if name.endswith(".arrow")
        }
    return set()


def _unused(path: Path, used: set[Path]) -> bool:
    return (
        path.is_dir()
        and not path.is_symlink()
        and not path.name.startswith(".")
        and path.resolve() not in used
    )


def _key(name: str) -> str:
    """The key in the name of a dataset, or of what belongs to one.

    Such a name is <name>-<12 hexadecimal digits>.
    """
    match = re.search(r"-([0-9a-f]{12})(?![0-9a-f])", name)
    return match[1] if match else "unknown"


def _of_run(run: RunFolder, rules: Rules) -> Iterator[Leftover]:
    for place in (run.path, run.checkpoints):
        for path in sorted(place.glob("*")):
            if TEMPORARY.fullmatch(path.name):
                of_export = path.name.startswith(f".{run.export.name}.")
                lock = run.export_lock if of_export else run.lock
                yield Leftover(path, "temporary", lock)
            elif DAMAGED.fullmatch(path.name) and (
                # A folder without it may be of the user's.
                place == run.checkpoints or (path / MANIFEST).exists()
            ):
                yield Leftover(path, "damaged, moved aside", run.lock)
    for path in sorted((run.checkpoints / "abandoned").glob("*")):
        yield Leftover(path, ABANDONED, run.lock)
    if rules.keep_checkpoints is not None:
        permanent = run.require_lineage().train.save_permanent_every
        checkpoints = committed(run.checkpoints)
        for path in prunable(checkpoints, rules.keep_checkpoints, permanent):
            yield Leftover(path, OLDER, run.lock)


def _older(path: Path, moment: float) -> bool:
    """Whether the path is there, and nothing was done to it since that moment."""
    try:
        status = path.lstat()
    except FileNotFoundError:  # pruned, or a temporary file that has served
        return False
    # A rename changes the latter alone.
    return max(status.st_mtime, status.st_ctime) <= moment


class FoundFile(Record):
    """A file or folder that can be deleted, or is; path: relative to home."""

    path: str
    kind: str
    bytes: int


class KeptFile(Record):
    """A file or folder that could be deleted but is in use; by: who uses it."""

    path: str
    by: str


class Collected(Record):
    """The result of `collect`. removed: whether the files are gone; bytes: of all of them."""

    removed: bool
    bytes: int
    files: tuple[FoundFile, ...]
    in_use: tuple[KeptFile, ...]


def collect(home: Path, rules: Rules, yes: bool) -> Collected:
    """List what can be deleted and, with `yes`, delete it.

    Files that a running process uses are kept.
    """
    for run, fault in _lineages(home)[1].items():
        log.warning(
            "%s The files of run %s are kept, and datasets, older and abandoned checkpoints of all "
            "runs.",
            fault,
            run.name,
        )
    found = leftovers(home, rules)
    sizes = [
        leftover.path.lstat().st_size
        if leftover.path.is_symlink()
        else size_of(leftover.path)
        for leftover in found
    ]
    by_lock = defaultdict[Path, list[Leftover]](list)
    for leftover in found:
        by_lock[leftover.lock].append(leftover)
    kept = dict[Leftover, str]()
    for lock, of_lock in by_lock.items():
        user = _user_of(lock)
        if user is not None:
            kept |= dict.fromkeys(of_lock, user)
        elif yes:
            kept |= _remove(home, rules, lock, of_lock)
    files: list[FoundFile] = []
    in_use: list[KeptFile] = []
    for leftover, size in zip(found, sizes, strict=True):
        relative = leftover.path.relative_to(home).as_posix()
        if leftover in kept:
            in_use.append(KeptFile(path=relative, by=kept[leftover]))
        else:
            files.append(FoundFile(path=relative, kind=leftover.kind, bytes=size))
    latest = home / "datasets" / "latest"
    if yes and latest.is_symlink() and not latest.exists():
        latest.unlink()
    return Collected(
        removed=yes,
        bytes=sum(file.bytes for file in files),
        files=tuple(files),
        in_use=tuple(in_use),
    )


def _user_of(lock: Path) -> str | None:
    """The holder of the lock, or that it cannot be taken.

    The file may be another user's, or on a disk that is only read.
    """
    existing = next(path for path in (lock, *lock.parents) if path.exists())
    if os.access(existing, os.W_OK):
        return lock_holder(lock)
    return f"the file system ({existing} cannot be written)"


def _remove(
    home: Path,
    rules: Rules,
    lock: Path,
    of_lock: list[Leftover],
) -> dict[Leftover, str]:
    """Delete what has this lock under it, as far as it still can be.

    Returns:
        what is kept, with who holds the lock, or why.
    """
    kept = dict[Leftover, str]()
    try:
        with Lock(lock):
            # Not for each file: all of the home is gone through.
            still = set(leftovers(home, rules))
            for leftover in of_lock:
                fault = (
                    _delete(leftover)
                    if leftover in still
                    else "what became of it meanwhile"
                )
                if fault:
                    kept[leftover] = fault
            return kept
    except Busy:
        return dict.fromkeys(
            of_lock, lock_holder(lock) or "another process, a moment ago"
        )
    except OSError as fault:
        return dict.fromkeys(of_lock, f"the file system ({fault.strerror})")


def _delete(leftover: Leftover) -> str | None:
    """Delete a file or folder; return why it cannot be deleted, or None."""
    try:
        if not leftover.path.is_dir() or leftover.path.is_symlink():
            leftover.path.unlink(missing_ok=True)
        elif leftover.kind == "temporary":
            shutil.rmtree(leftover.path)
        else:
            remove(leftover.path)
    except OSError as fault:
        # It is another user's, or NFS keeps a file of it that another process reads.
        return f"the file system ({fault.strerror})"
    log.info("removed %s", leftover.path)
    return None
