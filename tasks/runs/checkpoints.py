"""The checkpoints of a run as folders: which are committed, which is newest, best or damaged. Needs no torch."""

import logging
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.records.record import first_fault
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.storage.artifacts import (
    Damaged,
    check,
    file_checksum,
    move_aside,
    read_manifest,
    remove,
    set_pointer,
)

KIND, FORMAT_VERSION = "checkpoint", 2
STATE_FILE = "train_state.json"
NAME = re.compile(r"step-[0-9]{8,}")
log = logging.getLogger("infini_llama.train")


class Measured(NamedTuple):
    """A checkpoint and its validation loss; None where none was measured or the file is not as it was written."""

    path: Path
    loss: float | None


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _named(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name, newest first."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and not path.is_symlink()]
    return sorted(found, key=step_of, reverse=True)


def verify(path: Path, checksums: bool) -> int:
    """The step of the checkpoint at `path`, once `artifacts.check` has passed and its name, manifest and train state agree.

    Args:
        checksums: also read every file; without it, the train state is not read.

    Raises:
        Damaged: names what differs.
    """
    step = check(path, KIND, checksums).content.get("step", -1)
    if NAME.fullmatch(path.name) and step != step_of(path):
        raise Damaged(f"{path} holds the checkpoint of step {step}, not of the step in its name.")
    if checksums and (state := read_state(path)).step != step:
        raise Damaged(f"{path / STATE_FILE} is of step {state.step}, and the manifest of step {step}.")
    return int(step)


def is_committed(path: Path) -> bool:
    """Whether `verify` without checksums passes."""
    try:
        verify(path, checksums=False)
    except Damaged:
        return False
    return True


def faults(folder: Path) -> list[str]:
    """What is wrong with each checkpoint that `committed` leaves out, newest first; contents are not read."""
    found: list[str] = []
    for path in _named(folder):
        try:
            verify(path, checksums=False)
        except Damaged as fault:
            if path.is_dir():  # else it was pruned meanwhile
                found.append(f"checkpoint {path.name} is damaged and left out: {fault}")
    return found


def committed(folder: Path) -> list[Path]:
    """Folders with the valid manifest of their step and every file at its size, newest first; contents are not read."""
    return [path for path in _named(folder) if is_committed(path)]


def latest_step(folder: Path) -> int:
    """Step of the newest committed checkpoint, 0 without one."""
    return next((step_of(path) for path in committed(folder)), 0)


def digest_at(folder: Path, step: int) -> str | None:
    """Digest of the checkpoint of a step; None where there is none or its manifest is damaged."""
    try:
        return read_manifest(checkpoint_path(folder, step), KIND).digest
    except Damaged:
        return None


def is_digest_at(folder: Path, step: int, digest: str | None) -> bool:
    """Whether the checkpoint of a step has this digest; None: the digest was not recorded."""
    return digest is None or digest == digest_at(folder, step)


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


def newest_good(folder: Path, until: int | None = None) -> Path | None:
    """The newest checkpoint, up to step `until`, whose every checksum holds; damaged ones are moved aside, with a line that says so."""
    # Looked for anew each time: where one was pruned while it was read, there is a newer one.
    while named := [path for path in _named(folder) if until is None or step_of(path) <= until]:
        if _is_good(named[0]):
            return named[0]
    return None


def _is_good(path: Path) -> bool:
    """Whether every checksum holds; else it is moved aside, or was pruned meanwhile, and has its name no longer."""
    try:
        verify(path, checksums=True)
    except Damaged as fault:
        try:
            aside = move_aside(path)
        except FileNotFoundError:  # by the training beside which it is read
            return False
        log.warning(
            "checkpoint %s is damaged and not used: %s It was moved to %s; the next one is used.",
            path.name,
            fault,
            aside,
        )
        return False
    return True


def losses(folder: Path) -> list[Measured]:
    """Every committed checkpoint, newest first.

    Those that cannot be read just now, or were pruned a moment ago, are left out.
    """
    found: list[Measured] = []
    for path in committed(folder):
        with suppress(OSError):
            found.append(Measured(path, _loss(path)))
    return found


def _loss(checkpoint: Path) -> float | None:
    try:
        expected = read_manifest(checkpoint, KIND).files[STATE_FILE]
        if file_checksum(checkpoint / STATE_FILE) != expected.checksum:
            log.warning("%s is damaged; its validation loss is not used.", checkpoint / STATE_FILE)
            return None
        loss = read_state(checkpoint).validation_loss
    except (Damaged, KeyError):
        return None
    return loss if loss is not None and math.isfinite(loss) else None  # checkpoints of before may say NaN


def lowest_loss(folder: Path) -> float:
    """The lowest validation loss of any committed checkpoint; infinity where none was measured."""
    return min((loss for _, loss in losses(folder) if loss is not None), default=math.inf)


def best(folder: Path) -> Path | None:
    """The committed checkpoint with the lowest validation loss; the earlier one of two equals."""
    return _lowest(losses(folder))


def _lowest(measured: list[Measured]) -> Path | None:
    found = [(loss, step_of(path), path) for path, loss in measured if loss is not None]
    return min(found)[2] if found else None


def point_and_prune(folder: Path, keep: int, permanent_every: int | None = None) -> None:
    """Moves the pointers `latest` and `best`, then removes all but the `keep` newest checkpoints and the best one.

    Checkpoints of every `permanent_every`-th step are never removed, and not among the `keep`.
    """
    if committed(folder):
        point(folder)
    for path in superseded(folder, keep, permanent_every):
        remove(path)


def point(folder: Path) -> None:
    """Makes the pointers `latest` and `best` name the checkpoints that are so now; one that would name none is removed."""
    for name, path in (("latest", next(iter(committed(folder)), None)), ("best", best(folder))):
        if path is not None:
            set_pointer(folder, name, path.name)
        else:
            (folder / name).unlink(missing_ok=True)


def superseded(folder: Path, keep: int, permanent_every: int | None = None) -> list[Path]:
    """Committed checkpoints beyond the `keep` newest, without the best one and those of every `permanent_every`-th step.

    One that cannot be read just now stays: it may be the best.
    """
    measured = losses(folder)
    passing = [path for path, _ in measured if not permanent_every or step_of(path) % permanent_every]
    return [path for path in passing[keep:] if path != _lowest(measured)]


def choose(folder: Path, resume: str, resumed_before: str | None) -> Path | None:
    """The checkpoint to start from under the rule `runtime.resume`, verified; None is a fresh start.

    A PATH is followed until the run has a good checkpoint of its own since (`resumed_before` remembers that it was followed), so
    that the same command carries on after a crash. Going back to an older checkpoint of this run moves the newer ones to `abandoned/`.
    """
    if resume == "never":
        return refuse_any(folder)
    if resume not in ("auto", "must", "best"):
        if resume == resumed_before:
            is_own = Path(resume).resolve().parent == folder.resolve()
            if (carried_on := newest_good(folder)) or (
                is_own and not Path(resume).exists()
            ):  # a rollback went before it
                return carried_on
        return _explicit(folder, Path(resume))
    while resume == "best" and (chosen := best(folder)) is not None:
        if _is_good(chosen):
            abandon_newer(folder, step_of(chosen))
            return chosen
    chosen = newest_good(folder)
    if chosen is None and resume == "must":
        raise ConfigError(
            f"runtime.resume=must, but {folder} has no valid checkpoint; use runtime.resume=auto to start from step 0."
        )
    return chosen


def refuse_any(folder: Path) -> None:
    """For `runtime.resume=never`: a folder without checkpoints, or a ConfigError."""
    if committed(folder):
        raise ConfigError(
            f"runtime.resume=never, but {folder} has checkpoints; choose another runtime.name, or "
            "runtime.resume=auto to resume."
        )


def _explicit(folder: Path, path: Path) -> Path:
    path = path.resolve()
    if not path.is_dir():
        raise ConfigError(
            f"runtime.resume={path} is not a folder; give auto, must, never, best or a checkpoint's path."
        )
    step = verify(path, checksums=True)
    if path.parent == folder.resolve():
        abandon_newer(folder, step)
    elif committed(folder):
        raise ConfigError(
            f"runtime.resume={path} belongs to another run, but {folder} has checkpoints of its own; choose another "
            "runtime.name."
        )
    return path


def abandon_newer(folder: Path, step: int) -> None:
    """Moves the checkpoints of later steps to `abandoned/`, also damaged ones: the run will write others of their names."""
    newer = [path for path in _named(folder) if step_of(path) > step]
    for path in newer:
        abandoned = folder / "abandoned"
        abandoned.mkdir(exist_ok=True)
        before = sum(1 for _ in abandoned.glob(f"{path.name}*"))
        target = abandoned / (f"{path.name}-{before + 1}" if before else path.name)
        path.rename(target)
        log.warning("checkpoint %s was moved to %s: the run returns to step %d.", path.name, target, step)
    if newer:
        point(folder)
