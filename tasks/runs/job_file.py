"""job.json in the folder of an attempt: what its workers are given."""

import json
from pathlib import Path

from infini_llama.tasks.records.job import JobStart, TrainingJob
from infini_llama.tasks.storage.artifacts import write_atomic


def job_path(attempt_dir: Path) -> Path:
    """The file of an attempt's job."""
    return attempt_dir / "job.json"


def read_job(attempt_dir: Path) -> TrainingJob:
    """What the workers of an attempt are given.

    Raises:
        OSError, ValueError: there is no such file, or it is damaged.
    """
    return TrainingJob.from_json(json.loads(job_path(attempt_dir).read_text(encoding="utf-8")))


def read_start(attempt_dir: Path) -> JobStart:
    """When and from which step an attempt started; as `read_job`, without its other fields."""
    return JobStart.from_json(json.loads(job_path(attempt_dir).read_text(encoding="utf-8")))


def write_job(attempt_dir: Path, job: TrainingJob) -> None:
    """Write the job of an attempt, or renew it."""
    write_atomic(job_path(attempt_dir), json.dumps(job.to_json(), indent=1))
