"""Unchanged files are not read again; a changed one always is."""

import os

import pytest

from infini_llama.tasks.preprocess.sources import survey as corpus
from infini_llama.tasks.preprocess.sources import survey_cache as surveys
from support.stages import survey


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(6):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text number {number}")
    (tmp_path / "text" / "x.jsonl").write_text('{"text": "a"}\nbroken\n{"text": "b"}\n')
    return tmp_path / "text"


@pytest.fixture
def look(data, text, tmp_path, monkeypatch):
    """look() -> the names of the files that were read, the identity, and the report."""
    monkeypatch.setattr(surveys, "SETTLED", -(10**9))
    scan = corpus.scan_source

    def of(**changes):
        read = []
        monkeypatch.setattr(
            corpus,
            "scan_source",
            lambda source, *given, **more: (read.append(source.name), scan(source, *given, **more))[1],
        )
        found = survey(data(**{"files": [str(text)], "on_bad_input": "skip"} | changes), tmp_path / "notes")
        return sorted(read), found.identity, found.report

    return of


def test_unchanged_files_are_not_read_again_and_give_the_same(look, text):
    first = look()
    assert len(first[0]) == 7 and first[2].bad_records == 1
    assert look() == ([], *first[1:])
    (text / "3.txt").write_text("text NUMBER 3")  # as long as before
    os.utime(text / "3.txt", (1, 1))  # the kernel's clock of files is coarse
    assert look()[0] == ["3.txt"]
    (text / "4.txt").replace(text / "8.txt")
    read, identity, _ = look()
    assert read == ["8.txt"] and [row[0] for row in identity["documents"]][4:6] == ["5.txt", "8.txt"]
    assert look(min_length=14)[2].too_short == 8  # another question, another answer


def test_adding_or_removing_a_file_rereads_no_other(look, text):
    look()
    (text / "9.txt").write_text("text number 9")
    assert look()[0] == ["9.txt"]
    (text / "0.txt").unlink()
    (text / "inner").mkdir()
    (text / "inner" / "a.txt").write_text("text in a folder below")
    assert look()[0] == ["inner/a.txt"]
    assert look(files=[str(text / "1.txt")])[0] == []  # the same file for another configuration
    assert look()[0] == []


def test_a_file_whose_time_was_set_back_is_read_again(look, text):
    look()
    status = (text / "1.txt").stat()
    (text / "1.txt").write_text("TEXT number 1")
    os.utime(text / "1.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert look()[0] == ["1.txt"]


def test_a_recently_changed_file_is_not_cached(look, monkeypatch):
    monkeypatch.setattr(surveys, "SETTLED", 10**12)
    assert len(look()[0]) == len(look()[0]) == 7


def test_generated_text_is_not_cached_under_a_file_name(data, tmp_path, monkeypatch):
    monkeypatch.setattr(surveys, "SETTLED", -(10**9))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "passkey").write_text("a file of the user's")

    def identity(repetitions):
        made = {"documents": 5, "repetitions": repetitions}
        return survey(data(files=[], source="passkey", passkey=made), tmp_path / "notes").identity

    assert identity(1) == identity(1) != identity(2)
    assert not list((tmp_path / "notes").glob("*.json"))


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
@pytest.mark.parametrize("file", ["*.json", "*.rows"])
def test_a_damaged_cache_is_ignored(look, tmp_path, file, damage):
    first = look()
    (note,) = (tmp_path / "notes").glob(file)
    content = bytearray(note.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    note.write_bytes({"cut": content[:-30], "flip": content, "empty": b""}[damage])
    assert look() == first
