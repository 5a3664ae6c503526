"""job.json in the folder of an attempt: what its workers are given."""

from pathlib import Path
from typing import TypeVar

from infini_llama.tasks.records.job import JobStart, TrainingJob
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.runs.identity import read_of_run, write_of_run
from infini_llama.tasks.storage.record_file import as_record

RecordType = TypeVar("RecordType", bound=Record)


def job_path(attempt_dir: Path) -> Path:
    """The file of an attempt's job."""
    return attempt_dir / "job.json"


def read_job(attempt_dir: Path) -> TrainingJob:
    """What the workers of an attempt are given.

    Raises:
        Damaged: there is no such file, or it is not as it was written.
    """
    return _read(TrainingJob, attempt_dir)


def read_start(attempt_dir: Path) -> JobStart:
    """When and from which step an attempt started; as `read_job`, without its other fields."""
    return _read(JobStart, attempt_dir)


def _read(kind: type[RecordType], attempt_dir: Path) -> RecordType:
    path = job_path(attempt_dir)
    return as_record(kind, read_of_run(attempt_dir.parents[1], path), path)


def write_job(attempt_dir: Path, job: TrainingJob) -> None:
    """Write the job of an attempt, or renew it."""
    write_of_run(attempt_dir.parents[1], job_path(attempt_dir), job)
