"""Which run a record belongs to: every record of a run has the run's id, so that a file of another run is not taken for its own."""

import secrets
from contextlib import suppress
from pathlib import Path

from infini_llama.configs.reading import JsonObject
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.record_file import read_fields, write_fields

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
