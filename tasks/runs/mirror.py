"""The mirror: a copy of a run and its dataset beyond this machine, made while the run trains.

The run comes back from it to a machine that has neither.

It is on any filesystem that fsspec knows. An object store has no rename, so there the manifest is
the commit: it is copied last and deleted first, and a folder without one does not exist for a
reader. A fetched artifact is used once every checksum of its manifest holds.
"""

# pyright: reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
import errno
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from infini_llama.configs.errors import (
    ConfigError,
    PipelineError,
    Preempted,
    no_space,
    shown_url,
    url_error_message,
)
from infini_llama.configs.schema import PipelineConfig, TrainingConfig
from infini_llama.tasks.records.dataset import (
    DatasetPlan,
    DatasetRef,
    PlannedTable,
    RowTableRef,
)
from infini_llama.tasks.records.manifest import AnyManifest
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.checkpoints import KIND, Checkpoint
from infini_llama.tasks.runs.run_folder import RUN_ID, RunFolder, attempt_folders
from infini_llama.tasks.runs.start_records import start_records
from infini_llama.tasks.storage.artifacts import (
    EXPORT,
    MANIFEST,
    ROW_TABLES,
    Damaged,
    OtherVersion,
    check,
    has_all_files,
    publish,
    read_manifest,
    staged,
)
from infini_llama.tasks.storage.files import sync, temporary_name
from infini_llama.tasks.storage.locks import FOREVER, Lock

log = logging.getLogger("infini_llama.mirror")
LOOK_EVERY = 1.0  # seconds
WAITED_FOR = 30.0  # seconds between two lines about a mirror that is waited for
MOST_NAMES = 10  # of what is not copied


class Mirror:
    """A place to which artifacts below `home` are copied under the same relative paths.

    Where it cannot be reached, this and every method raises what its filesystem does; these errors
    have no class in common.

    Args:
        url: as fsspec writes it, for example s3://bucket/project, memory://project or a path.
        home: the local counterpart.

    Raises:
        ConfigError: the protocol is unknown, its package is not installed, or no bucket or folder
            is named.
    """

    def __init__(self, url: str, home: Path) -> None:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self.home = home
        self.url = shown_url(url)
        try:
            place: tuple[Any, str] = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as fault:
            raise ConfigError(f"storage.mirror={self.url}: {fault}") from None
        self.files, self.root = place
        self.is_folder = isinstance(self.files, LocalFileSystem)
        if not self.root:  # `runs` would be a bucket
            raise ConfigError(
                f"storage.mirror={self.url} names no bucket or folder, such as s3://bucket/project."
            )

    def place(self, path: Path) -> str:
        """The place in the mirror of `path`, below home."""
        return f"{self.root.rstrip('/')}/{path.relative_to(self.home).as_posix()}"

    def has(self, path: Path, of: Path | None = None) -> bool:
        """Whether the mirror has the artifact at `path` whole, with the same manifest, bytewise.

        Args:
            path: where the artifact is committed.
            of: where it has been moved to since.
        """
        return self.read(path / MANIFEST) == ((of or path) / MANIFEST).read_bytes()

    def has_content(self, path: Path, kind: str) -> bool:
        """As `has`, also where another machine has made the same content at another time."""
        if not self.is_whole(path):
            return False
        with suppress(Damaged):
            return self.manifest(path, kind).digest == read_manifest(path, kind).digest
        return False

    def keep(self, path: Path, kind: str) -> int:
        """Copy the artifact at `path`, manifest last; return its bytes.

        Raises:
            Damaged: its files do not have the sizes of its manifest; a copy of it would be
                worthless.
            OSError: the mirror does not take it.
        """
        manifest = check(path, kind, checksums=False)
        place = self.place(path)
        # Of an artifact of this name that was built anew.
        self._remove_file(f"{place}/{MANIFEST}")
        for name, expected in manifest.files.items():
            self.keep_file(path / name)
            size = self.files.size(f"{place}/{name}")
            if size != expected.size:
                raise OSError(
                    f"{place}/{name} has {size} bytes after it was copied, not {expected.size}"
                )
        self.keep_file(path / MANIFEST)
        return sum(file.size for file in manifest.files.values())

    def keep_file(self, path: Path) -> None:
        """Copy one file."""
        place = self.place(path)
        self.files.makedirs(str(PurePosixPath(place).parent), exist_ok=True)
        if not self.is_folder:
            self.files.put_file(str(path), place)
            return
        # Others replace an object as a whole.
        part = temporary_name(Path(place))
        self.files.put_file(str(path), str(part))
        part.replace(place)

    def kept(self, folder: Path) -> list[Path]:
        """The artifacts that are kept whole directly below `folder`.

        They are given as the local paths they would have.
        """
        return [path for path in self.copies(folder) if self.is_whole(path)]

    def copies(self, folder: Path) -> list[Path]:
        """As `kept`, also those whose copying did not end."""
        place = self.place(folder)
        self.files.invalidate_cache()
        if not self._exists(place):
            return []
        entries = self.files.ls(place, detail=True)
        names = [PurePosixPath(entry["name"]).name for entry in entries]
        return [folder / name for name in sorted(names)]

    def is_whole(self, path: Path) -> bool:
        """Whether all of the artifact at `path` was copied."""
        return self._exists(f"{self.place(path)}/{MANIFEST}")

    def manifest(self, path: Path, kind: str) -> AnyManifest:
        """The manifest of the copy of the artifact at `path`.

        Raises:
            Damaged: see `read_manifest`.
        """
        with TemporaryDirectory() as folder:
            self._fetch(path / MANIFEST, Path(folder) / MANIFEST)
            return read_manifest(Path(folder), kind)

    def read(self, path: Path) -> bytes:
        """The bytes of one file that is kept; none where it is not."""
        place = self.place(path)
        return self.files.cat_file(place) if self._exists(place) else b""

    def restore(self, path: Path, kind: str) -> bool:
        """Fetch the artifact to `path`, unless it is there, if the mirror has it.

        It is used only once every checksum holds.

        Returns:
            whether it is there now.
        """
        if has_all_files(path, kind):  # a killed command had restored it
            return True
        if not self.is_whole(path):
            return False
        with staged(path) as folder:
            try:
                self._fetch(path / MANIFEST, folder / MANIFEST)
                manifest = read_manifest(folder, kind)
                for name in manifest.files:  # none is outside the folder
                    self._fetch(path / name, folder / name)
                check(folder, kind, checksums=True)
            except (Damaged, FileNotFoundError) as fault:
                # Without this checkpoint, the run would begin again.
                if kind == KIND and isinstance(fault, OtherVersion):
                    raise
                log.warning(
                    "the copy of %s in %s is damaged and not used: %s",
                    path.name,
                    self.url,
                    fault,
                )
                return False
            publish(folder, path, manifest)
        log.info("%s was restored from %s", path.relative_to(self.home), self.url)
        return True

    def restore_file(self, path: Path) -> bool:
        """Fetch one file where it is kept, in place of any that is here."""
        if not self._exists(self.place(path)):
            return False
        temporary = temporary_name(path)
        self._fetch(path, temporary)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
        return True

    def delete(self, path: Path) -> None:
        """Delete a kept artifact, its manifest first."""
        self._remove_file(f"{self.place(path)}/{MANIFEST}")
        self.files.rm(self.place(path), recursive=True)

    def _fetch(self, path: Path, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        self.files.get_file(self.place(path), str(to))

    def _exists(self, place: str) -> bool:
        try:
            # `exists` of most filesystems is False also where they cannot be reached.
            self.files.info(place)
        except OSError as fault:  # that of SMB has the number without the class
            if not isinstance(fault, FileNotFoundError) and fault.errno != errno.ENOENT:
                raise
            return False
        return True

    def _remove_file(self, place: str) -> None:
        if self._exists(place):
            self.files.rm_file(place)


def restore_dataset(config: PipelineConfig, plan: Callable[[], DatasetPlan]) -> None:
    """Fetch the planned dataset where the mirror has it and home has not.

    `plan` may read the text; without a mirror it is not called.

    Raises:
        PipelineError: see `_asked`.
    """
    if config.storage.mirror is None:
        return
    planned = plan()
    home = config.runtime.home.resolve()
    dataset = home / "datasets" / planned.name
    missing = [
        (path, kind)
        for path, kind in _of_dataset(dataset, planned.row_tables)
        if not path.exists()
    ]
    if not missing:
        return
    with _asked(config, config.storage.mirror):
        mirror = Mirror(config.storage.mirror, home)
        for path, kind in missing:
            if path == dataset or dataset.exists():
                mirror.restore(path, kind)


def restore_run(config: PipelineConfig) -> None:
    """Fetch the run's records and its newest whole checkpoint where home has no such run.

    Raises:
        PipelineError: see `_asked`.
    """
    run = RunFolder.of(config.runtime)
    if config.storage.mirror is None or _is_here(run):
        return
    with Lock(run.lock, wait=FOREVER), _asked(config, config.storage.mirror):
        if _is_here(run):  # another command has fetched it, and may train by now
            return
        mirror = Mirror(config.storage.mirror, config.runtime.home.resolve())
        for path in reversed(mirror.kept(run.checkpoints)):
            if mirror.restore(path, KIND):
                # The lineage is the last: where it is, everything is.
                for record in run.records:
                    mirror.restore_file(record)
                return


def _is_here(run: RunFolder) -> bool:
    """Whether the run can continue from what is on this machine, also where its lineage is lost."""
    if run.lineage.exists():
        return True
    # A restore that was cut off has brought a checkpoint, and no attempt.
    return bool(attempt_folders(run)) and bool(checkpoints.committed(run.checkpoints))


def restore_start(config: PipelineConfig, file: Path) -> None:
    """Fetch the record of a start that another machine has written, if the mirror has it.

    Raises:
        PipelineError: see `_asked`.
    """
    if config.storage.mirror is None or file.exists():
        return
    with _asked(config, config.storage.mirror):
        Mirror(config.storage.mirror, config.runtime.home.resolve()).restore_file(file)


def is_mirrored(config: PipelineConfig) -> bool:
    """Whether the mirror has a run of this name.

    Raises:
        PipelineError: see `_asked`.
    """
    if config.storage.mirror is None:
        return False
    with _asked(config, config.storage.mirror):
        mirror = Mirror(config.storage.mirror, config.runtime.home.resolve())
        return bool(mirror.read(RunFolder.of(config.runtime).lineage))
    return False


@contextmanager
def _asked(config: PipelineConfig, url: str) -> Generator[None]:
    """A block that fetches from the mirror.

    If that fails, a run that is here continues. Another one may be there, and does not begin.

    Raises:
        ConfigError: the mirror refuses access, or would be below a file.
        PipelineError: it fails for a reason that may pass.
    """
    try:
        yield
    except PipelineError:
        raise
    except Exception as fault:  # of any filesystem's making
        if no_space(fault):  # on this machine
            raise
        name = config.runtime.name
        words = f"storage.mirror={shown_url(url)} cannot be read ({url_error_message(fault, url)})"
        if _is_here(RunFolder.of(config.runtime)):
            log.warning(
                "%s; run %s continues with what is on this machine.", words, name
            )
            return
        is_refused = isinstance(fault, (PermissionError, NotADirectoryError))
        kind = ConfigError if is_refused else PipelineError
        raise kind(
            f"{words}. Run {name} is not on this machine, but may be there. Make the mirror "
            "readable and run the same command again, or set storage.mirror=null to begin the run "
            "without it."
        ) from None


@contextmanager
def mirrored(config: PipelineConfig, reference: DatasetRef) -> Generator[None]:
    """Copy what is committed in the background, inside the block; leaving waits for the last copy.

    After a request to stop, it waits for `runtime.grace_period` at most.

    A mirror that does not answer never stops training: each new fault is logged as a warning, and a
    failed copy is tried again. What is not copied in the end is logged, too.
    """
    url = config.storage.mirror
    if url is None:
        yield
        return
    home = config.runtime.home.resolve()
    over = threading.Event()
    of_dataset = _of_dataset(home / reference.path, reference.row_tables)
    if not (home / reference.path).is_relative_to(home):
        log.warning(
            "the dataset %s is not below runtime.home=%s, and is not copied to storage.mirror",
            reference.path,
            home,
        )
        of_dataset = []
    run = RunFolder.of(config.runtime)
    copying = _Copying(url, home, run, config.train, of_dataset)

    def copy() -> None:
        logged = ""
        while True:
            last = over.is_set()
            sentence = copying.once(last)
            if sentence and sentence != logged:
                log.warning("%s", sentence)
            logged = sentence
            if last:
                return
            over.wait(LOOK_EVERY)

    # In the caller's context: by it, Prefect knows the run that a line of the log is of.
    thread = threading.Thread(
        target=copy_context().run,
        args=(copy,),
        name="mirror",
        daemon=True,
    )
    thread.start()
    longest = math.inf
    try:
        yield
    except BaseException as error:
        if isinstance(error, Preempted) or not isinstance(error, Exception):
            longest = config.runtime.grace_period
        raise
    finally:
        over.set()
        copying.wait(thread, longest)


class _Copying:
    """The copying of what is committed of a run and its dataset, and what was copied so far.

    Raises:
        ConfigError: the protocol is unknown. A mirror that cannot be reached is tried again each
            time.
    """

    def __init__(
        self,
        url: str,
        home: Path,
        run: RunFolder,
        train: TrainingConfig,
        of_dataset: list[tuple[Path, str]],
    ) -> None:
        self.url = url
        self.home = home
        self.run = run
        self.train = train
        self.of_dataset = of_dataset
        self.copied: set[Path] = set()
        self.begun = checkpoints.latest_step(run.checkpoints)
        # The mirror's answer to what was committed here.
        self.answered: tuple[list[tuple[Path, int]], str] | None = None
        try:
            self.mirror: Mirror | None = Mirror(url, home)
        except ConfigError:
            raise
        except Exception:  # of any filesystem's making
            self.mirror = None

    def once(self, last: bool) -> str:
        """Copy what the mirror lacks, the `last` time the records as well.

        The mirror is asked again once it has failed, or once something was committed or deleted
        here: a request may cost money.

        Returns:
            what is to be said about it, "" if nothing.
        """
        try:
            committed = _committed(self.run)
            if self.answered and self.answered[0] == committed and not last:
                return self.answered[1]
            self.mirror = self.mirror or Mirror(self.url, self.home)
            sentence = self._copy(self.mirror, last)
            self.answered = (committed, sentence)
            return sentence
        except Exception as fault:  # of any filesystem's making
            failed = (
                f"copying to storage.mirror={shown_url(self.url)} failed "
                f"({url_error_message(fault, self.url)})"
            )
            return failed + (self._not_copied() if last else "; it will be retried.")

    def _copy(self, mirror: Mirror, last: bool) -> str:
        of_run = _of_run(self.run)
        for path, kind in self.of_dataset:
            _keep(mirror, self.run, path, kind)
            self.copied.add(path)
        kept = mirror.kept(self.run.checkpoints)
        if kept and _has_other_run(mirror, self.run):
            return (
                f"the mirror has another run of the name {self.run.path.name}, with another "
                f"{RUN_ID}; nothing of this one is copied. Choose another runtime.name or "
                "storage.mirror, or remove the copy of the other one."
            )
        ahead = _of_another(mirror, self.run, kept)
        if ahead:
            return (
                f"the mirror has step {checkpoints.step_of(ahead)} of run {self.run.path.name}, "
                f"but this machine continues from step {self.begun}; to use the mirror's copy, "
                f"move {self.run.path} away. Nothing is copied to the mirror until this machine "
                "has passed that step."
            )
        for path, kind in of_run:
            _keep(mirror, self.run, path, kind)
            self.copied.add(path)
        if last:
            _records(mirror, self.run)
            self.copied.add(self.run.path)
        _delete_pruned(mirror, self.run, self.train)
        return ""

    def wait(self, thread: threading.Thread, longest: float) -> None:
        """Wait for the last copy, for `longest` seconds at most; log that it is waited for."""
        until = time.monotonic() + longest
        url = shown_url(self.url)
        while thread.is_alive():
            left = until - time.monotonic()
            if left <= 0:
                log.warning(
                    "storage.mirror=%s does not answer%s", url, self._not_copied()
                )
                return
            thread.join(min(left, WAITED_FOR))
            if thread.is_alive():
                log.info("waiting for the last copy to storage.mirror=%s", url)

    def _not_copied(self) -> str:
        paths = [
            path
            for path, _ in (*self.of_dataset, *_of_run(self.run))
            if path not in self.copied
        ]
        names = [path.relative_to(self.home).as_posix() for path in paths]
        if self.run.path not in self.copied:
            names.append(f"the records of run {self.run.path.name}")
        if not names:
            return "."
        more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
        return (
            f"; not copied: {', '.join(names[:MOST_NAMES] + more)}. Run the same command again to "
            "copy them."
        )


def _of_dataset(
    folder: Path,
    row_tables: Iterable[PlannedTable | RowTableRef],
) -> list[tuple[Path, str]]:
    """The artifacts of a dataset, with their kinds."""
    tables = [
        (folder / ROW_TABLES / table.row_table, ROW_TABLES) for table in row_tables
    ]
    return [(folder, "dataset"), *tables]


def _of_run(run: RunFolder) -> list[tuple[Path, str]]:
    """The artifacts of a run: checkpoints, oldest first, and the export."""
    artifacts = [
        (checkpoint.path, KIND)
        for checkpoint in reversed(checkpoints.committed(run.checkpoints))
    ]
    if has_all_files(run.export, EXPORT):  # it may be a folder of the user
        artifacts.append((run.export, EXPORT))
    return artifacts


def _committed(run: RunFolder) -> list[tuple[Path, int]]:
    """The artifacts of a run, with the time at which each was committed, in nanoseconds.

    There is none that is deleted meanwhile.
    """
    found: list[tuple[Path, int]] = []
    for path, _ in _of_run(run):
        with suppress(FileNotFoundError):
            found.append((path, (path / MANIFEST).stat().st_mtime_ns))
    return found


def _keep(mirror: Mirror, run: RunFolder, path: Path, kind: str) -> None:
    if not path.exists() or mirror.has(path):  # a checkpoint may have been pruned since
        return
    if kind == KIND:
        _records(mirror, run)
    elif mirror.has_content(path, kind):
        return
    try:
        sent = mirror.keep(path, kind)
    except (Damaged, FileNotFoundError):
        if path.exists():
            raise
        return  # it was pruned meanwhile, and `_delete_pruned` deletes the part
    log.info("%s was copied to %s (%.1f MB)", path.name, mirror.url, sent / 1e6)


def _records(mirror: Mirror, run: RunFolder) -> None:
    """Copy the records, and those of the run's starts.

    The metrics may be ahead of a checkpoint, never behind: they are cut when the run is resumed.
    """
    for file, start in start_records(mirror.home).items():
        if start.name == run.path.name:
            mirror.keep_file(file)
    for record in filter(Path.exists, run.records):
        mirror.keep_file(record)


def _has_other_run(mirror: Mirror, run: RunFolder) -> bool:
    """Whether the mirror's copy of this name is of a run with another id.

    Without the records of either, it is taken for this run's.
    """
    here = run.read_id()
    there = ""
    with suppress(ValueError, AttributeError):  # not JSON, or no object
        there = json.loads(mirror.read(run.lineage)).get(RUN_ID, "")
    return bool(here and there) and here != there


def _of_another(mirror: Mirror, run: RunFolder, kept: list[Path]) -> Path | None:
    """The newest of these copies that is of a later step, and that this folder never had.

    Another machine took the run further, and its copy is left whole.
    """
    newest = checkpoints.latest_step(run.checkpoints)
    ahead = [path for path in kept if checkpoints.step_of(path) > newest]
    return next(
        (path for path in reversed(ahead) if not _abandoned(mirror, path)), None
    )


def _delete_pruned(mirror: Mirror, run: RunFolder, train: TrainingConfig) -> None:
    """Follow the pruning of this run's checkpoints, and its going back to an older one.

    Checkpoints of a machine that was lost may be in the mirror alone. They are pruned by the same
    rule, so that the best one and permanent ones stay.
    """
    here = checkpoints.committed(run.checkpoints)
    paths_here = {checkpoint.path for checkpoint in here}
    there = list[Checkpoint]()
    for path in mirror.copies(run.checkpoints):
        if path in paths_here or not checkpoints.NAME.fullmatch(path.name):
            continue
        is_older = bool(here) and checkpoints.step_of(path) < here[0].step
        is_part = not mirror.is_whole(path)
        if _abandoned(mirror, path) or (is_older and is_part):
            mirror.delete(path)
        elif is_older:
            with suppress(Damaged):  # of a copy that is damaged, nothing is known
                manifest = mirror.manifest(path, KIND)
                there.append(checkpoints.described(path, manifest))
    everywhere = sorted([*here, *there], key=lambda one: one.step, reverse=True)
    pruned = checkpoints.prunable(
        everywhere, train.save_total_limit, train.save_permanent_every
    )
    for path in {checkpoint.path for checkpoint in there} & set(pruned):
        mirror.delete(path)


def _abandoned(mirror: Mirror, path: Path) -> bool:
    """Whether the copy of this checkpoint is of one that this run has gone back from."""
    folders = (path.parent / "abandoned").glob(f"{path.name}*")
    return any(mirror.has(path, of=folder) for folder in folders)
