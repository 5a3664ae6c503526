"""resolved.json in the folder of an attempt: what its workers are given."""

from pathlib import Path
from typing import TypeVar

from infini_llama.tasks.records.record import Record
from infini_llama.tasks.records.resolved_run import AttemptStart, ResolvedRun
from infini_llama.tasks.runs.identity import read_of_run, write_of_run
from infini_llama.tasks.storage.record_file import as_record

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
