"""The checkpoints of a run as folders: which are committed, which is newest, best or damaged.

Needs no torch.
"""

import errno
import logging
import math
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.records.manifest import AnyManifest
from infini_llama.tasks.records.record import first_fault
from infini_llama.tasks.records.train_state import SKIP_WINDOW, TrainState
from infini_llama.tasks.storage.artifacts import (
    Damaged,
    OtherVersion,
    check,
    move_aside,
    remove,
    remove_pointer,
    set_pointer,
)

KIND = "checkpoint"
STATE_FILE = "train_state.json"
NAME = re.compile(r"step-[0-9]{8,}")
RULES = ("auto", "must", "never", "best")  # of runtime.resume; anything else is a path
POINTERS = ("latest", "best")
log = logging.getLogger("infini_llama.train")


class Checkpoint(NamedTuple):
    """A committed checkpoint, as its manifest describes it.

    Attributes:
        validation_loss: measured at its step, nats per token; None: not measured there, or not
            finite.
    """

    path: Path
    step: int
    validation_loss: float | None
    digest: str


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def named(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name, or links to where they were moved, newest first."""
    paths = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(paths, key=step_of, reverse=True)


def verify(path: Path, checksums: bool) -> Checkpoint:
    """The checkpoint at `path`, once `artifacts.check` has passed and its name and manifest agree.

    Args:
        checksums: also read every file.

    Raises:
        Damaged: names what differs.
    """
    manifest = check(path, KIND, checksums)
    step = manifest.content.get("step", -1)
    if NAME.fullmatch(path.name) and step != step_of(path):
        raise Damaged(
            f"{path} holds the checkpoint of step {step}, not of the step in its name."
        )
    return described(path, manifest)


def described(path: Path, manifest: AnyManifest) -> Checkpoint:
    """The checkpoint that is committed at `path`, by its manifest."""
    return Checkpoint(
        path,
        manifest.content.get("step", -1),
        manifest.content.get("validation_loss"),
        manifest.digest,
    )


def committed(folder: Path) -> list[Checkpoint]:
    """Checkpoints with a valid manifest and every file at its size, newest first.

    The contents of the files are not read.
    """
    return [entry for entry in _examined(folder) if isinstance(entry, Checkpoint)]


def faults(folder: Path) -> list[Damaged]:
    """The fault of each checkpoint that `committed` leaves out, newest first."""
    return [entry for entry in _examined(folder) if isinstance(entry, Damaged)]


def _examined(folder: Path) -> Iterator[Checkpoint | Damaged]:
    for path in named(folder):
        try:
            yield verify(path, checksums=False)
        except Damaged as fault:
            if path.is_dir():  # else it was pruned meanwhile
                yield fault


def latest_step(folder: Path) -> int:
    """Step of the newest committed checkpoint, 0 without one."""
    return next((checkpoint.step for checkpoint in committed(folder)), 0)


def read_state(checkpoint: Path) -> TrainState:
    """The scalars of a checkpoint.

    Raises:
        Damaged: the file is missing, is not JSON, or has a field of another type.
    """
    try:
        return TrainState.read_json((checkpoint / STATE_FILE).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{checkpoint / STATE_FILE} is missing.") from None
    except ValidationError as fault:
        raise Damaged(f"{checkpoint / STATE_FILE}: {first_fault(fault)}.") from None


def newest_with_damaged_moved_aside(
    folder: Path,
    until: int | None = None,
) -> Path | None:
    """The newest checkpoint, up to step `until`, whose every checksum holds.

    Damaged ones are moved aside, if they may be, with a warning.

    Raises:
        OtherVersion: a newer one was written by another version of this program; it is left as it
            is.
    """

    def newest(damaged: set[Path]) -> Path | None:
        paths = (path for path in named(folder) if path not in damaged)
        return next(
            (path for path in paths if until is None or step_of(path) <= until), None
        )

    return _first_whole(newest)


def _first_whole(choose: Callable[[set[Path]], Path | None]) -> Path | None:
    """The first chosen checkpoint whose every checksum holds; damaged ones are moved aside.

    Args:
        choose: the best checkpoint but for damaged ones. It lists them anew each time: where one
            was pruned while it was read, there is a newer one.
    """
    damaged = set[Path]()
    chosen = choose(damaged)
    while chosen is not None and not _verify_or_move_aside(chosen):
        damaged.add(chosen)
        chosen = choose(damaged)
    return chosen


def _verify_or_move_aside(path: Path) -> bool:
    """Whether every checksum holds; otherwise the checkpoint is moved aside.

    It is not moved if it was pruned meanwhile, is another user's or is on a read-only disk.
    """
    try:
        verify(path, checksums=True)
    except OtherVersion:
        raise
    except Damaged as fault:
        try:
            outcome = f"was moved to {move_aside(path)}"
        except FileNotFoundError:  # pruned by the training beside which it is read
            return False
        except OSError as refusal:
            if refusal.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            outcome = f"cannot be moved aside ({refusal.strerror})"
        log.warning(
            "checkpoint %s is damaged and not used: %s It %s; the next one is used.",
            path.name,
            fault,
            outcome,
        )
        return False
    return True


def lowest_loss(folder: Path) -> float:
    """The lowest validation loss of any committed checkpoint; infinity where none was measured."""
    losses = (checkpoint.validation_loss for checkpoint in committed(folder))
    return min((loss for loss in losses if loss is not None), default=math.inf)


def best_of(checkpoints: list[Checkpoint]) -> Path | None:
    """The checkpoint with the lowest validation loss; None where none was measured.

    Of two equals, it is the earlier one.
    """
    losses = [
        (loss, step, path) for path, step, loss, _ in checkpoints if loss is not None
    ]
    return min(losses)[2] if losses else None


def keep_under_second_name(path: Path) -> None:
    """Give a checkpoint whose step is about to be saved again a second name.

    It stays valid under it, until `point_and_prune` finds the new one.
    """
    try:
        verify(path, checksums=False)
    except Damaged:  # there is none, or `commit` moves it
        return
    second = path.with_name(path.name.replace("-", "-0"))
    if second.exists():
        remove(second)
    path.rename(second)
    point(path.parent)


def point_and_prune(
    folder: Path,
    keep: int,
    permanent_every: int | None = None,
) -> None:
    """Move the pointers `latest` and `best`, then remove what is `prunable`."""
    for path in named(folder):
        first = checkpoint_path(folder, step_of(path))
        if path != first and first.exists():
            remove(path)
    point(folder)
    for path in prunable(committed(folder), keep, permanent_every):
        remove(path)


def point(folder: Path) -> None:
    """Make the pointers `latest` and `best` name the checkpoints that are so now.

    A pointer that would name none is removed.
    """
    checkpoints = committed(folder)
    for name in POINTERS:
        path = _pointed(checkpoints, name)
        if path is not None:
            set_pointer(folder, name, path.name)
        else:
            remove_pointer(folder, name)


def _pointed(checkpoints: list[Checkpoint], name: str) -> Path | None:
    """The checkpoint that a pointer names, also on a disk without links; None: there is none."""
    if name == "best":
        return best_of(checkpoints)
    return checkpoints[0].path if checkpoints else None


def prunable(
    checkpoints: list[Checkpoint],
    keep: int,
    permanent_every: int | None = None,
) -> list[Path]:
    """Checkpoints beyond the `keep` newest.

    Not among them are the best one, the one to which a first rollback would go, and those of every
    `permanent_every`-th step, which do not count as one of the `keep`.

    Args:
        checkpoints: newest first; the newest one is on this machine.
    """
    passing = [
        path
        for path, step, *_ in checkpoints
        if not permanent_every or step % permanent_every
    ]
    try:
        needed = (best_of(checkpoints), _before_first_skip(checkpoints))
    except Damaged:  # it is not known which one a rollback needs
        return []
    return [path for path in passing[keep:] if path not in needed]


def _before_first_skip(checkpoints: list[Checkpoint]) -> Path | None:
    """The newest checkpoint from before the first skipped update that still counts.

    If more updates are skipped, the run diverges, and goes back to it.

    Args:
        checkpoints: newest first.

    Raises:
        Damaged: the train state of the newest one.
    """
    if not checkpoints:
        return None
    newest = checkpoints[0]
    skips = read_state(newest.path).skips
    first = min((step for step in skips if step > newest.step - SKIP_WINDOW), default=0)
    return next((path for path, step, *_ in checkpoints if step < first), None)


def choose_and_abandon_newer(
    folder: Path,
    resume: str,
    resumed_before: str | None,
) -> Path | None:
    """The checkpoint to start from under the rule `runtime.resume`, verified; None: a fresh start.

    A PATH is followed until the run has saved a valid checkpoint of its own after that
    (`resumed_before`: the PATH that was followed), so that the same command continues after a
    crash. Going back to an older checkpoint of this run moves the newer ones to `abandoned/`.
    """
    if resume == "never":
        refuse_existing_checkpoints(folder)
        return None
    if resume not in RULES:
        if resume == resumed_before:
            carried_on = newest_with_damaged_moved_aside(folder)
            is_own = Path(resume).parent.resolve() == folder.resolve()
            # A rollback went before a PATH of this run that is gone.
            if carried_on or (is_own and not Path(resume).exists()):
                return carried_on
        return _explicit(folder, Path(resume))
    if resume == "best":
        chosen = _first_whole(
            lambda damaged: best_of(
                [
                    checkpoint
                    for checkpoint in committed(folder)
                    if checkpoint.path not in damaged
                ]
            )
        )
        if chosen is not None:
            abandon_newer(folder, step_of(chosen))
            return chosen
    chosen = newest_with_damaged_moved_aside(folder)
    if chosen is None and resume == "must":
        raise ConfigError(
            f"runtime.resume=must, but {folder} has no valid checkpoint; use runtime.resume=auto "
            "to start from step 0."
        )
    return chosen


def refuse_existing_checkpoints(folder: Path) -> None:
    """Refuse a folder that has checkpoints, for `runtime.resume=never`.

    Raises:
        ConfigError: it has some.
    """
    if committed(folder):
        raise ConfigError(
            f"runtime.resume=never, but {folder} has checkpoints; choose another runtime.name, or "
            "runtime.resume=auto to resume."
        )


def _explicit(folder: Path, path: Path) -> Path:
    # Not further: a checkpoint that was moved has a link in its place.
    path = path.parent.resolve() / path.name
    if path.name in POINTERS:
        path = _pointed(committed(path.parent), path.name) or path
    if not path.is_dir():
        raise ConfigError(
            f"runtime.resume={path} is not a folder; give auto, must, never, best or a "
            "checkpoint's path."
        )
    if (path / "checkpoints").is_dir():
        raise ConfigError(
            f"runtime.resume={path} is a run's folder; give a checkpoint in it, such as "
            f"{path / 'checkpoints' / 'latest'}."
        )
    step = verify(path, checksums=True).step
    if path.parent == folder.resolve():
        abandon_newer(folder, step)
    elif path.parent == folder.resolve() / "abandoned" and committed(folder):
        raise ConfigError(
            f"runtime.resume={path} was abandoned by this run; to use it again, move it into "
            f"{folder}, and set runtime.resume to it there."
        )
    elif committed(folder):
        raise ConfigError(
            f"runtime.resume={path} belongs to another run, but {folder} has checkpoints of its "
            "own; choose another runtime.name."
        )
    return path


def abandon_newer(folder: Path, step: int) -> None:
    """Move the checkpoints of later steps to `abandoned/`, also damaged ones.

    The run will write others of their names.
    """
    newer = [path for path in named(folder) if step_of(path) > step]
    for path in newer:
        abandoned = folder / "abandoned"
        abandoned.mkdir(exist_ok=True)
        targets = (
            abandoned / (f"{path.name}-{number}" if number > 1 else path.name)
            for number in count(1)
        )
        target = next(target for target in targets if not target.exists())
        path.rename(target)
        log.warning(
            "checkpoint %s was moved to %s: the run returns to step %d.",
            path.name,
            target,
            step,
        )
    if newer:
        point(folder)
