"""Which run a flow run or a Slurm job has begun: a record in `<home>/starts/<ID>.json`."""

import logging
from pathlib import Path

from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.record_files import read_record

log = logging.getLogger("infini_llama.run")


class StartRecord(Record):
    """The name that was filled in for a start.

    Attributes:
        requeues: how often the job had been requeued when a command last used the name.
    """

    name: str
    requeues: int = 0


def start_file(home: Path, start: str) -> Path:
    """The file of the start with this ID."""
    return home / "starts" / f"{start}.json"


def read_start(file: Path) -> StartRecord | None:
    """The record in a start's file; None without one, or with a warning if it is damaged."""
    if not file.exists():
        return None
    try:
        return read_record(StartRecord, file)
    except Damaged as fault:
        log.warning("%s It is not used, and the start gets a new name.", fault)
        return None


def start_records(home: Path, prefix: str = "") -> dict[Path, StartRecord]:
    """The records in a home folder by their files, of starts whose ID begins with `prefix`."""
    records = {
        file: read_start(file)
        for file in sorted((home / "starts").glob(f"{prefix}*.json"))
    }
    return {file: record for file, record in records.items() if record is not None}
