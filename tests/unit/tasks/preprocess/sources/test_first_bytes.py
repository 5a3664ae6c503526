"""What is not text is no document, whatever the file is named; data.format is not second-guessed."""

import gzip
import io
import json
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess.sources import formats
from infini_llama.tasks.preprocess.sources.texts import Unreadable

PAGE = b"<!DOCTYPE html>\n<html><body><p>You have to sign in.</p></body></html>\n"
DENIED = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>'
)
LINES = b"".join(
    json.dumps({"id": number, "text": f"text {number}"}).encode() + b"\n"
    for number in range(60)
)
TABLE = b"id,text\n" + b"".join(
    b"%d,text %d\n" % (number, number) for number in range(60)
)


def parquet() -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": ["text"] * 60}), sink)
    return sink.getvalue()


def written(path: Path, content: bytes) -> Path:
    """The file, compressed where its name says so."""
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def documents(
    path: Path, form: str = "auto", text_column: str = "text"
) -> list[object]:
    return list(chain.from_iterable(formats.read(path, text_column, form)))


@pytest.mark.parametrize(
    "name",
    ["book.txt", "book.txt.gz", "notes.md", "part.jsonl", "part.csv", "book", "a.py"],
)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PAGE, "is a web page, perhaps one to sign in"),
        (b"\xef\xbb\xbf\n<!-- saved -->\n<HTML lang='en'>", "is a web page"),
        (b'<?xml version="1.0"?>\n' + PAGE, "is a web page"),
        (DENIED, "is an error of an object store as XML"),
        (
            b"<Error xmlns='x'><Code>NoSuchKey</Code>",
            "is an error of an object store as XML",
        ),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", "is a PDF, not text"),
        (rb"{\rtf1\ansi\deff0 The river\par}", "is RTF, not text"),
        (
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1 river",
            "is a document of an old Office program",
        ),
    ],
)
def test_a_page_or_formatted_document_in_place_of_a_text_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(Unreadable, match=message):
        documents(written(tmp_path / name, content))


@pytest.mark.parametrize(
    ("ending", "begin", "message"),
    [
        ("7z", b"7z\xbc\xaf\x27\x1c\0\4", "is an archive; unpack it"),
        ("rar", b"Rar!\x1a\x07\1\0", "is an archive; unpack it"),
        ("lz4", b"\x04\x22\x4d\x18\x64\x40\xa7", "is compressed with lz4"),
        ("sz", b"\xff\x06\0\0sNaPpY", "is compressed with snappy"),
        ("lz", b"LZIP\x01\x0c", "is compressed with lzip, which is not unpacked here"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl.{}", "a.{}", "a.jsonl", "a"])
def test_what_is_packed_in_a_way_that_is_not_read_is_refused(
    tmp_path: Path, name: str, ending: str, begin: bytes, message: str
) -> None:
    path = tmp_path / name.format(ending)
    path.write_bytes(begin + LINES)
    with pytest.raises(DataError, match=message) as raised:
        documents(path)
    assert "rename" not in str(raised.value)


@pytest.mark.parametrize("name", ["page.html", "page.htm.gz", "book.xml"])
def test_pages_are_read_where_the_name_says_so(tmp_path: Path, name: str) -> None:
    assert documents(written(tmp_path / name, PAGE)) == [PAGE.decode()]


@pytest.mark.parametrize("content", [PAGE, DENIED, LINES, TABLE])
def test_a_format_of_the_configuration_is_not_second_guessed(
    tmp_path: Path, content: bytes
) -> None:
    assert documents(written(tmp_path / "part-00000", content), "txt") == [
        content.decode()
    ]


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("part-00000", LINES, "jsonl"),
        ("train.jsonl-00000-of-00002", LINES, "jsonl"),
        ("train.jsonl.1", LINES, "jsonl"),
        ("train.jl", LINES, "jsonl"),
        ("train.txt", LINES, "jsonl"),
        ("part-00000", LINES.replace(b'"text"', b'"body"'), "jsonl"),
        ("long.jl", b'{"id": 1, "text": "' + b"word " * 20_000 + b'"}\n', "jsonl"),
        ("answer.txt", b'{"error": "Not Found"}', "json"),
        ("dump", b'[\n  {"text": "one"},\n  {"text": "two"}\n]\n', "json"),
        ("table.csv.old", TABLE, "csv"),
        ("one-column.csv.old", b"text\na\nb\n", "csv"),
        ("part-00000", TABLE, "csv"),
        ("export.txt", TABLE.replace(b",", b"\t"), "tsv"),
        ("train.parquet-00000-of-00001", parquet(), "parquet"),
        ("part-00001", parquet(), "parquet"),
        ("table.csv", parquet(), "parquet"),
    ],
)
def test_records_under_another_name_are_refused_with_their_format(
    tmp_path: Path, name: str, content: bytes, kind: str
) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(
        DataError, match=f"rename it to end with .{kind}, or set data.format={kind}"
    ):
        documents(path)
    text_column = "body" if b'"body"' in content else "text"
    if kind != "json" or b"error" not in content:
        texts = documents(path, kind, text_column)
        assert texts and all(isinstance(text, str) for text in texts)


@pytest.mark.timeout(20)  # patterns that try again what they have passed never end
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("story.txt", "text, and more of it\nid, too\n"),
        ("code.py", '{"a": 1}\n'),
        ("notebook.ipynb", '{\n "cells": []\n}\n'),
        ("readme.md", '<p align="center">words</p>\n<html>'),
        ("log.txt", "{not json} words\n"),
        ("about.csv.txt", "What the table has.\n"),
        ("to.json.py", "def to_json(x): return str(x)\n"),
        ("about.json.html", "<html>What JSON is.</html>\n"),
        ("none.txt", ""),
        ("lines.txt", "\n\n"),
        ("blanks.txt", f"{' ' * 5000}word"),
        ("many-lines.txt", "\n" * 5000 + "word"),
        ("comments.txt", "<!-- a -->\n" * 500 + "word"),
        ("open-comments.txt", f"{'<!--' * 500}word"),
        ("declarations.txt", f"{'<?xml ?> ' * 500}word"),
        ("brackets.txt", f"{'[ ' * 500}word"),
    ],
    ids=lambda value: value[:20],
)
def test_text_that_resembles_something_else_is_read(
    tmp_path: Path, name: str, content: str
) -> None:
    assert documents(written(tmp_path / name, content.encode())) == [content]
