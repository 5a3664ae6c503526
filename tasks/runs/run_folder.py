"""The folder of a run: what it remembers, and the files that a run appends to."""

import json
import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from blake3 import blake3
from pydantic import JsonValue

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import JsonObject
from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.records.metrics import (
    METRICS_LINE,
    MetricsLine,
    SampleLine,
    StepLine,
    TrainLine,
    ValidationLine,
)
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.records.resolved_run import AttemptStart, ResolvedRun
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.storage.artifacts import Damaged, readable
from infini_llama.tasks.storage.files import write_atomic
from infini_llama.tasks.storage.json_lines import Kind, append_line, read_lines, scan, unreadable
from infini_llama.tasks.storage.record_file import as_record, read_fields, write_fields

RUN_ID, LINEAGE = "run_id", "lineage.json"  # the first record of a run


def run_id(run_dir: Path) -> str | None:
    """The id in a run's lineage.json; that of its other records where they agree on another one. None before the first record."""
    own = _id_in(run_dir / LINEAGE)
    attempts = sorted(
        (run_dir / "logs").glob("attempt-*/resolved.json"), key=lambda path: (len(path.parent.name), path)
    )
    others = [found for path in [*attempts[-1:], run_dir / "environment.json"] if (found := _id_in(path))]
    return own if own in others or not others else others[0]


def _id_in(path: Path) -> str | None:
    with suppress(Damaged):
        found = read_fields(path).get(RUN_ID) if path.exists() else None
        return found if isinstance(found, str) else None
    return None


def write_of_run(run_dir: Path, path: Path, record: Record) -> None:
    """Replace the record in `path` of the run in `run_dir`."""
    own = run_id(run_dir) or (secrets.token_hex(8) if path.name == LINEAGE else None)
    write_fields(path, ({RUN_ID: own} if own else {}) | record.to_json())


def read_of_run(run_dir: Path, path: Path) -> JsonObject:
    """The fields of the record in `path`; a record without an id may be of any run.

    Raises:
        Damaged: there is none, it is not as it was written, or it is of another run.
    """
    fields, own = read_fields(path), run_id(run_dir)
    if (found := fields.pop(RUN_ID, own)) != own and own is not None:
        raise Damaged(f"{path} belongs to another run: its {RUN_ID} is {found}, and this run's is {own}.")
    return fields


RecordType = TypeVar("RecordType", bound=Record)
AnyStep = TypeVar("AnyStep", bound=StepLine)
log = logging.getLogger("infini_llama.train")


class _Entry:
    """A file or folder of a run, as an attribute of `RunFolder`: its path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunFolder", kind: object = None) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run; the attributes beside `path` are the paths of what it has."""

    path: Path

    checkpoints = _Entry("checkpoints")
    lineage = _Entry("lineage.json")
    environment = _Entry("environment.json")
    attempts = _Entry("attempts.jsonl")
    metrics = _Entry("metrics.jsonl")
    samples = _Entry("samples.jsonl")
    evaluations = _Entry("evaluations.jsonl")
    result = _Entry("result.json")
    summary = _Entry("summary.json")
    config = _Entry("config.yaml")

    @property
    def id(self) -> str:
        """The run's id; "" before its first record."""
        return run_id(self.path) or ""

    def read(self, path: Path) -> JsonObject:
        """The fields of a record of this folder, {} while its file does not exist.

        Raises:
            Damaged: it is not as it was written, or it is of another run.
        """
        return read_of_run(self.path, path) if os.path.lexists(path) else {}

    def write(self, path: Path, record: Record) -> None:
        """Replace a record of this folder."""
        write_of_run(self.path, path, record)

    def read_or_rebuild(self, path: Path) -> JsonObject:
        """As `read`, for a file that training writes again: {} with a warning where it is damaged."""
        try:
            return self.read(path)
        except Damaged as fault:
            log.warning("%s It is not used; training writes it again.", fault)
            return {}

    def read_record(self, kind: type[RecordType], path: Path) -> RecordType | None:
        """The record in a file that training writes again: None without it, and with a warning where it is damaged."""
        try:
            return as_record(kind, self.read(path), path) if os.path.lexists(path) else None
        except Damaged as fault:
            log.warning("%s It is not used; training writes it again.", fault)
            return None

    def read_lineage(self) -> Lineage | None:
        """lineage.json, None while it does not exist; if it is damaged, the copy that the newest attempt was given.

        Raises:
            Damaged: there is no such copy.
        """
        if not os.path.lexists(self.lineage):
            return None
        try:
            return as_record(Lineage, self.read(self.lineage), self.lineage)
        except Damaged as fault:
            for attempt_dir in reversed(attempt_folders(self)):
                given = resolved_path(attempt_dir)
                with suppress(Damaged):
                    copy = as_record(Lineage, self.read(given).get("lineage"), given)
                    log.warning("%s The copy in %s is used.", fault, given)
                    return copy
            raise Damaged(
                f"{fault} It records what the run was trained on, and no attempt has a copy. Put the file back from a backup or a mirror, "
                "or choose another runtime.name."
            ) from None

    def require_lineage(self) -> Lineage:
        """lineage.json of a run that has started.

        Raises:
            ConfigError: this is not the folder of a run.
            Damaged: as `read_lineage`.
        """
        self.require_is_run()
        lineage = self.read_lineage()
        assert lineage is not None
        return lineage

    def require_is_run(self) -> None:
        """Pass if a run has started in this folder.

        Raises:
            ConfigError: none has.
        """
        if not os.path.lexists(self.lineage):
            raise ConfigError(
                f"{self.path} is not a run folder (it has no lineage.json); give the path of runs/<name> in your "
                "home folder."
            )

    def write_config(self, config: JsonObject) -> None:
        """Write config.yaml, for people and for comparisons of runs; its first line has the checksum of the run's id and the others."""
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        write_atomic(self.config, f"# {_checksum(text, self.id)}\n{text}")

    def read_config(self) -> JsonObject | None:
        """config.yaml, None without it; a file whose first line is not its checksum is used as it is.

        Raises:
            Damaged: it is not as it was written, or not YAML.
        """
        if not os.path.lexists(self.config):
            return None
        with readable(self.config):
            written = self.config.read_bytes()
        try:
            text = written.decode()
            first, _, rest = text.partition("\n")
            if first.startswith("# blake3:") and first != f"# {_checksum(rest, self.id)}":
                raise Damaged(
                    f"{self.config} does not match its own checksum, or is of another run. If you changed it on "
                    "purpose, delete its first line; otherwise it is damaged."
                )
            # through JSON, since YAML has dates and keys that are no text
            config: JsonValue = json.loads(json.dumps(yaml.safe_load(text), default=str))
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):
            raise Damaged(f"{self.config} is not YAML.") from None
        if not isinstance(config, dict):
            raise Damaged(f"{self.config} is not a configuration.")
        return config

    def write_lineage(self, lineage: Lineage) -> None:
        """Write lineage.json."""
        self.write(self.lineage, lineage)


def _checksum(text: str, run: str) -> str:
    return f"blake3:{blake3((run + text).encode()).hexdigest()}"


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed, and what vanishes meanwhile counts nothing."""
    if path.is_symlink() or not path.is_dir():
        with suppress(FileNotFoundError):
            return path.lstat().st_size
        return 0
    total = 0
    for root, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                total += Path(root, name).lstat().st_size
    return total


def remove_staging(run: RunFolder) -> None:
    """Removes what a killed save left half-written; only called under the run's lock."""
    for path in run.checkpoints.glob(".step-*"):
        log.info("removing %s, left by a save that did not finish", path.name)
        shutil.rmtree(path)


def cut_metrics(run: RunFolder, step: int) -> None:
    """Cuts metrics.jsonl and samples.jsonl back to `step`, so that the resumed run neither repeats nor skips a line.

    Lines that cannot be read are removed, with a warning.
    """
    _cut(run.metrics, METRICS_LINE, step, run.id)
    _cut(run.samples, SampleLine, step, run.id)


def _cut(path: Path, kind: Kind[AnyStep], step: int, run: str) -> None:
    if not path.exists():
        return
    if fault := unreadable(path, kind, run):
        log.warning("%s; removed.", fault)
    size = 0  # bytes that stay where they are
    rest: list[bytes] = []  # lines that stay behind one that does not
    cut = False
    for _, line, record in scan(path, kind, run):
        if record is None or record.step > step:
            cut = True
        elif cut:
            rest.append(line)
        else:
            size += len(line)
    if rest:
        with path.open("rb") as file:
            write_atomic(path, b"".join([file.read(size), *rest]).decode())
    else:
        os.truncate(path, size)


def lacking_steps(run: RunFolder, step: int) -> list[int]:
    """The steps of this run up to `step` that metrics.jsonl has no line of."""
    there = {line.step for line in read_metrics(run) if isinstance(line, TrainLine)}
    return [number for number in range(_first_step(run, step), step + 1) if number not in there]


def _lacking_validations(run: RunFolder, step: int) -> list[int]:
    """The steps up to `step` at which a validation was due, and metrics.jsonl has none."""
    lineage = run.read_lineage()
    if lineage is None or not isinstance(interval := lineage.train.eval_steps, int):
        return []
    there = {line.step for line in read_metrics(run) if isinstance(line, ValidationLine)}
    due = range(interval, step + 1, interval)
    return [number for number in due if number >= _first_step(run, step) and number not in there]


def _first_step(run: RunFolder, step: int) -> int:
    """The first step of this run: another one than 1 where it began from a checkpoint of another run."""
    lineage = run.read_lineage()
    start = lineage.resumed_from if lineage else None
    if not start or Path(start).resolve().parent == run.checkpoints.resolve():
        return 1
    return 1 + min((record.from_step for record in attempts(run) if record.from_step is not None), default=step)


def warn_of_lacking_steps(run: RunFolder, step: int) -> None:
    """Log a warning if metrics.jsonl lacks lines of steps up to `step`."""
    if lacking := lacking_steps(run, step):
        log.warning(
            "%s has no line for %d of the steps up to the checkpoint's %d (the first is step %d): they are missing "
            "from curves and totals.",
            run.metrics,
            len(lacking),
            step,
            lacking[0],
        )
    if lacking := _lacking_validations(run, step):
        log.warning(
            "%s has no validation of step %s: it is lost, or train.eval_steps was another one then.",
            run.metrics,
            ", ".join(map(str, lacking[:3])) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""),
        )


def read_metrics(run: RunFolder) -> list[MetricsLine]:
    """Every line of metrics.jsonl that can be read; the next attempt removes the others."""
    return read_lines(run.metrics, METRICS_LINE, run.id)


def append_attempt(run: RunFolder, record: AttemptRecord) -> None:
    """Add the end of an attempt to attempts.jsonl."""
    append_line(run.attempts, record, run.id)


def attempt_folders(run: RunFolder) -> list[Path]:
    """The folder of every attempt, oldest first: by number, since the hundredth's name sorts before the ninety-ninth's."""
    found = (run.path / "logs").glob("attempt-*")
    return sorted((path for path in found if re.fullmatch(r"attempt-[0-9]+", path.name)), key=number_of)


def number_of(attempt_dir: Path) -> int:
    return int(attempt_dir.name.removeprefix("attempt-"))


def attempts(run: RunFolder) -> list[AttemptRecord]:
    """Every attempt at this run whose line can be read, oldest first."""
    return read_lines(run.attempts, AttemptRecord, run.id)


RecordType = TypeVar("RecordType", bound=Record)


def resolved_path(attempt_dir: Path) -> Path:
    """The file of an attempt."""
    return attempt_dir / "resolved.json"


def read_resolved(attempt_dir: Path) -> ResolvedRun:
    """What the workers of an attempt are given.

    Raises:
        Damaged: there is no such file, or it is not as it was written.
    """
    return _read(ResolvedRun, attempt_dir)


def read_start(attempt_dir: Path) -> AttemptStart:
    """When and from which step an attempt started; as `read_resolved`, without its other fields."""
    return _read(AttemptStart, attempt_dir)


def _read(kind: type[RecordType], attempt_dir: Path) -> RecordType:
    path = resolved_path(attempt_dir)
    return as_record(kind, read_of_run(attempt_dir.parents[1], path), path)


def write_resolved(attempt_dir: Path, resolved: ResolvedRun) -> None:
    """Write what the workers of an attempt are given."""
    write_of_run(attempt_dir.parents[1], resolved_path(attempt_dir), resolved)
