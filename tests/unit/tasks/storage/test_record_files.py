"""A record with a changed byte is refused by name; one that a person edits on purpose is read."""

import pytest

from infini_llama.tasks.records.lineage import SampleRange
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.artifacts import SELF_CHECKSUM, Damaged
from infini_llama.tasks.storage.record_files import (
    read_fields,
    read_record,
    write_record,
)

RECORD = SampleRange(first=208, end=308)
DAMAGE = [
    b"",
    b"{",
    b"[1]",
    b"null",
    b"7",
    b"\0" * 9,
    b"\xff{}",
    b"[" * 100_000,
    b'{"a": NaN}',
    b'{"a": ' + b"9" * 9999 + b"}",
]


@pytest.fixture
def path(tmp_path):
    write_record(tmp_path / "record.json", RECORD)
    return tmp_path / "record.json"


def test_every_changed_bit_is_found_or_changes_nothing(path):
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            path.write_bytes(
                whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :]
            )
            try:
                assert read_record(SampleRange, path) == RECORD
            except Damaged as fault:
                assert str(path) in str(fault)


@pytest.mark.parametrize("text", DAMAGE, ids=lambda text: repr(text[:12]))
def test_what_is_no_record_is_named(path, text):
    path.write_bytes(text)
    with pytest.raises(Damaged, match=str(path)):
        read_record(SampleRange, path)


def test_a_folder_and_a_missing_file_are_named(path):
    path.unlink()
    with pytest.raises(Damaged, match=str(path)):
        read_fields(path)
    path.mkdir()
    with pytest.raises(Damaged, match=str(path)):
        read_fields(path)


def test_an_edit_is_refused_with_the_line_to_delete_and_read_without_it(path, caplog):
    path.write_text(path.read_text().replace("308", "309"))
    with pytest.raises(Damaged, match=SELF_CHECKSUM):
        read_record(SampleRange, path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if SELF_CHECKSUM not in line))
    assert read_record(SampleRange, path).end == 309 and str(path) in caplog.text


def test_a_record_of_another_run_is_named(tmp_path):
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    names = ("lineage.json", "environment.json", "logs/attempt-01/plan.json")
    for run in (one, two):
        (run.path / "logs/attempt-01").mkdir(parents=True)
        for name in names:
            run.write(run.path / name, RECORD)
            assert run.read(SampleRange, run.path / name) == RECORD
    for name in names:
        path = one.path / name
        kept = path.read_bytes()
        path.write_bytes((two.path / name).read_bytes())
        with pytest.raises(Damaged, match=name):
            one.read(SampleRange, path)
        for other in {"environment.json", "lineage.json"} - {name}:
            assert one.read(SampleRange, one.path / other) == RECORD, (
                "what is its own stays readable"
            )
        path.write_bytes(kept)
