"""Every malformed input that came to mind: a sentence and code 65, or left out and counted; nothing half-written is believed."""

import errno
import gzip
import io
import json
import lzma
import os
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infini_llama.configs.errors import DataError, PipelineError
from infini_llama.tasks.preprocess.sources import texts
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.verify_data.checks import verify
from support.stages import survey


def parquet(*values: Any, kind: pa.DataType | None = None) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array(values, kind)}), buffer)
    return buffer.getvalue()


NOISE = random.Random(4).randbytes(600)
GOOD = b'{"text": "good"}\n'
TABLE = parquet(*["good"] * 50)
ARROW = io.BytesIO()
with pa.ipc.new_stream(ARROW, pa.schema({"text": pa.string()})) as stream:
    stream.write_table(pa.table({"text": ["good"] * 50}), max_chunksize=2)
# Of 2 texts of 4 bytes, and damaged.
OFFSETS = (
    struct.pack("<3i", 0, 4, 8),
    struct.pack("<3i", 0, 4, 3),
)
# The first batch states a body that is 2**40 bytes longer than it is.
LONG_BATCH = bytearray(ARROW.getvalue())
LONG_BATCH[165] = 1
# name: content, the message about it, and how many of its documents and records are used and skipped
FILES = {
    "utf-16.txt": ("text".encode("utf-16"), "is UTF-16, not UTF-8"),
    "noise.csv": (NOISE, "is not UTF-8"),
    "noise.json": (NOISE, "is not UTF-8"),
    "noise.parquet": (NOISE, "is damaged (Parquet magic bytes not found in footer."),
    "noise.arrow": (NOISE, "is damaged"),
    "page.parquet": (
        b"<html>404</html>",
        "is damaged (Parquet magic bytes not found in footer.",
    ),
    "none.parquet": (b"", "is damaged (Parquet file size is 0 bytes)"),
    "none.arrow": (b"", "is damaged"),
    "none.csv": (b"", "has no column 'text' (it has none)"),
    "none.txt.gz": (b"", "is damaged (it has no bytes"),
    "none.jsonl.xz": (b"", "is damaged (it has no bytes"),
    "none.jsonl.zst": (b"", "is damaged (it has no bytes"),
    "joined.parquet": (TABLE + TABLE, "holds several parquet files, one after another"),
    "cut.parquet": (TABLE[: len(TABLE) // 2], "is damaged (Parquet magic bytes"),
    "cut.parquet.gz": (
        gzip.compress(TABLE)[:-20],
        "is damaged (Compressed file ended before",
    ),
    "cut-inside.parquet.gz": (
        gzip.compress(TABLE[:-20]),
        "is damaged (Parquet magic bytes",
    ),
    "flipped.parquet": (
        TABLE[:60] + bytes([TABLE[60] ^ 255]) + TABLE[61:],
        "is damaged (Couldn't deserialize thrift",
    ),
    "cut.jsonl.gz": (
        gzip.compress(GOOD * 99)[:-9],
        "is damaged (Compressed file ended before",
    ),
    "wrong-column.parquet": (
        parquet("x").replace(b"text", b"body"),
        "has no column 'text' (it has 'body')",
    ),
    "deep.json": (b"[" * 200_000, "is nested too deeply after its value 0"),
    "deep-and-whole.json": (
        b'{"text": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        "is nested too deeply after its value 0",
    ),
    "cut.json": (b'[{"text": "good"}, ', "is not JSON after its value 1"),
    "latin.txt": (b"caf\xe9", "is not UTF-8 (byte 3: 0xe9)"),
    "column.csv": (
        b"id,body\n1,good\n",
        "has no column 'text' (it has 'id', 'body'); name the one with the text in data.text",
    ),
    "quote.csv": (
        b'id,text\n1,good\n2,"open\n',
        "is damaged in the record that begins in line 3 (unexpected end",
    ),
    "cut.txt.gz": (gzip.compress(b"good" * 1000)[:-9], "is damaged"),
    "flipped.txt.gz": (
        gzip.compress(b"good")[:12] + b"\xff\xff" + gzip.compress(b"good")[14:],
        "is damaged",
    ),
    "cut.jsonl.xz": (lzma.compress(GOOD * 1000)[:-20], "is damaged"),
    "no.jsonl.zst": (b"this is no zstd", "is damaged"),
    "cut.arrow": (ARROW.getvalue()[:-150], "is damaged"),
    "offset.arrow": (
        ARROW.getvalue().replace(*OFFSETS),
        "is damaged, or is not UTF-8, in the rows from 1 (Offset",
    ),
    "latin.parquet": (
        TABLE.replace(b"good", b"goo\xe9"),
        "is damaged, or is not UTF-8, in the rows from 1 (Invalid UTF8",
    ),
    "name.arrow": (
        ARROW.getvalue().replace(b"text", b"t\xffxt"),
        "has a column whose name is not UTF-8",
    ),
    "name.parquet": (
        TABLE.replace(b"text", b"t\xffxt"),
        "has a column whose name is not UTF-8",
    ),
    "length.arrow": (bytes(LONG_BATCH), "is damaged (it states a length beyond"),
    "time.parquet": (
        parquet(2**62, kind=pa.timestamp("us")),
        "has timestamp[us] instead of text",
    ),
    "more-after-the-end.json": (
        b'[{"text": "good"}] rest',
        "is not JSON after its value 1",
    ),
}
RECORDS = {
    "nan.jsonl": (
        GOOD + b'{"text": NaN}\n',
        "has float instead of text in line 2",
        1,
        1,
    ),
    "infinity.jsonl": (
        GOOD + b'{"text": -Infinity}\n',
        "has float instead of text in line 2",
        1,
        1,
    ),
    "nan.parquet": (parquet(float("nan")), "has float instead of text in row 1", 0, 1),
    "bytes.parquet": (
        parquet(b"\xff", b"ok", kind=pa.binary()),
        "has bytes instead of text in row 1",
        0,
        2,
    ),
    "struct.parquet": (parquet({"a": 1}), "has dict instead of text in row 1", 0, 1),
    "arrays.json": (b'[["a"], ["b"]]', "has list instead of text in value 1", 0, 2),
    "deep.jsonl": (
        GOOD + b'{"text": ' + b"[" * 10**5 + b"\n",
        "has a line 2 that is nested too deeply",
        1,
        1,
    ),
    "deep-and-whole.jsonl": (
        GOOD + b"[" * 10**5 + b"]" * 10**5 + b"\n",
        "has a line 2 that is nested too deeply",
        1,
        1,
    ),
    "digits.jsonl": (
        GOOD + b'{"text": ' + b"9" * 6000 + b"}\n",
        "has int instead of text in line 2",
        1,
        1,
    ),
    "list.jsonl": (GOOD + b'["a"]\n', "has list instead of text in line 2", 1, 1),
    "no-field.jsonl": (
        GOOD + b'{"body": "a"}\n',
        "has no field 'text' in line 2",
        1,
        1,
    ),
    "latin.jsonl": (
        GOOD + b'{"text": "caf\xe9"}\n',
        "is not UTF-8 in line 2 (byte 13 of it)",
        1,
        1,
    ),
    "surrogate.json": (b'["good", {"text": "\\ud800"}]', "has half a character", 1, 1),
    "cut.jsonl": (GOOD + b'{"text": "half', "has a line 2 that is not JSON", 1, 1),
    "number.jsonl": (
        GOOD + b'{"text": 3}\n',
        "has int instead of text in line 2",
        1,
        1,
    ),
    "surrogate.jsonl": (GOOD + b'{"text": "\\ud800"}\n', "has half a character", 1, 1),
    "narrow.csv": (
        b"id,text\n1,good\n2\n",
        "has 1 fields instead of 2 in line 3",
        1,
        1,
    ),
    "wide.csv": (
        b"id,text\n1,good\n1,2,3\n",
        "has 3 fields instead of 2 in line 3",
        1,
        1,
    ),
}
TWICE = io.BytesIO()
pq.write_table(
    pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), TWICE
)
FILES["twice.parquet"] = (TWICE.getvalue(), "has 2 columns 'text'")
FILES["twice.csv"] = (b"text,text\na,b\n", "has 2 columns 'text'")
EMPTY = {
    "none.txt": b"",
    "none.jsonl": b"",
    "blank.jsonl": b"\n \n\n",
    "none.json": b"",
    "brackets.json": b"[]",
    "header.csv": b"id,text\n",
    "null.jsonl": b'{"text": null}\n',
    "nulls.parquet": parquet(None, None, kind=pa.string()),
    "only-null.parquet": parquet(None, None, kind=pa.null()),
    "nothing.txt.gz": gzip.compress(b""),
}


@pytest.fixture
def text(tmp_path) -> Path:
    """A folder with enough good text for a dataset, which no test of this file may lose a word of."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        (folder / f"fine-{number:02d}.txt").write_text(
            f"the {number}th good text, of which nothing may be lost " * 5
        )
    return folder


@pytest.mark.parametrize("name", [*FILES, *RECORDS])
def test_the_file_is_named_with_code_65(data, text, name):
    content, message, *_ = FILES.get(name) or RECORDS[name]
    (text / name).write_bytes(content)
    with pytest.raises(DataError) as refused:
        survey(data(files=[str(text)]))
    sentence = str(refused.value)
    assert sentence.startswith(f"{text / name} {message}") and "data.files" in sentence
    assert "\n" not in sentence and refused.value.exit_code == 65


def test_all_bad_documents_are_skipped_named_and_counted(
    data, text, tmp_path, caplog, monkeypatch
):
    for module in ("corpus", "tokens.parts"):
        monkeypatch.setattr(f"infini_llama.tasks.preprocess.{module}.NAMED", 100)
    for name, (content, *_) in (FILES | RECORDS).items():
        (text / name).write_bytes(content)
    settings = data(files=[str(text)], on_bad_input="skip")
    reference = preprocess(settings, tmp_path / "home")
    used, left_out = (
        sum(record[place] for record in RECORDS.values()) for place in (2, 3)
    )
    documents = reference.train.documents + reference.validation.documents
    assert documents == 30 + used
    verify(reference, tmp_path / "home", "deep")
    assert (
        f"{left_out} damaged records" in caplog.text
        and f"{len(FILES)} damaged files" in caplog.text
    )
    bad = survey(settings).report.bad
    assert all(
        any(str(text / name) in line for line in bad) for name in FILES | RECORDS
    )


@pytest.mark.parametrize("name", ["fine-07.txt", "large.jsonl"])
@pytest.mark.parametrize("on_bad_input", ["fail", "skip"])
def test_a_file_that_cannot_be_read_now_is_not_damaged(
    data, text, tmp_path, monkeypatch, small_units, on_bad_input, name
):
    """It would be left out for good: what was found in text that stays the same is remembered."""
    (text / "large.jsonl").write_bytes(GOOD * 1000)
    monkeypatch.setattr("infini_llama.tasks.preprocess.tokens.parts.SETTLED", -(10**10))
    settings, opened = data(files=[str(text)], on_bad_input=on_bad_input), Path.open

    def stale(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", stale)
        with pytest.raises(
            PipelineError,
            match=rf"{name} cannot be read now \(Stale file handle\); run the same",
        ) as now:
            preprocess(settings, tmp_path / "home")
    assert now.value.exit_code == 70
    reference = preprocess(settings, tmp_path / "home")
    assert reference.train.documents + reference.validation.documents == 1030


def test_a_tokenizer_learns_nothing_from_a_file_that_is_damaged_at_its_end(
    data, text, tmp_path, small_units
):
    """A dataset is named by the units that it uses: another machine, without the file, has the same name and the same bytes."""
    settings = data(files=[str(text)], on_bad_input="skip")
    lines = "".join(
        json.dumps({"text": f"zyxwvut {number} qqqq"}) + "\n"
        for number in range(100_000)
    )
    damaged = text / "z.jsonl.gz"
    damaged.write_bytes(gzip.compress(lines.encode())[:-9])
    with_it = preprocess(settings, tmp_path / "with")
    damaged.unlink()
    without = preprocess(settings, tmp_path / "without")
    assert with_it.text.left_out.bad_files == 1 and with_it.path == without.path
    assert with_it.digest == without.digest


def test_files_without_text_are_no_fault(data, text, tmp_path):
    for name, content in EMPTY.items():
        (text / name).write_bytes(content)
    reference = preprocess(data(files=[str(text)]), tmp_path / "home")
    assert reference.train.documents + reference.validation.documents == 30


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pattern", ["", "**/*.txt", "**/fine-*", "**"])
def test_links_in_circles_and_into_the_void_are_no_trap(data, text, tmp_path, pattern):
    """With `glob.glob` two links to their own folder are 2^40 paths."""
    for name in ("a", "b", "c"):
        (text / name).symlink_to(text)
    (text / "self.txt").symlink_to("self.txt")
    (text / "gone.txt").symlink_to(tmp_path / "nothing")
    (text / "folder.txt").mkdir()
    os.mkfifo(text / "pipe.txt")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "linked.txt").write_text("a linked text " * 9)
    (text / "linked").symlink_to(tmp_path / "elsewhere")
    settings = data(files=[str(text / pattern)], on_bad_input="skip")
    reference = preprocess(settings, tmp_path / "home")
    is_all = not pattern.endswith("fine-*")
    assert reference.train.documents + reference.validation.documents == 30 + is_all
    assert survey(settings).report.bad_files == 2 * is_all, (
        "a link to nothing is text that is missing"
    )


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder of a user whom permissions bind, as which the test runs where it would run as root."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        if root:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)
            for path in Path(name).rglob("*"):
                path.chmod(0o777)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_unreadable_folders_are_named(data, as_nobody, what):
    folder, home = as_nobody / "text", as_nobody / "home"
    (folder / "inner").mkdir(parents=True)
    for number in range(30):
        (folder / f"fine-{number:02d}.txt").write_text(f"the {number}th good text " * 9)
    (folder / "inner" / "secret.txt").write_text("secret")
    denied = folder / "inner" if what == "folder" else folder / "inner" / "secret.txt"
    denied.chmod(0)
    settings = data(files=[str(folder)])
    with pytest.raises(DataError, match=rf"{denied} .*Permission denied.*data\.files"):
        preprocess(settings, home)
    assert not list((home / "datasets").glob("files-*"))
    denied.chmod(0o755)
    assert preprocess(settings, home).built == ("tokens", "row tables")


def test_a_text_without_a_blank_is_refused_before_it_costs_the_memory(
    data, tmp_path, monkeypatch
):
    monkeypatch.setattr(texts, "LONGEST_UNBROKEN", 1000)
    for name, content in (
        ("good.txt", "words " * 500),
        ("bad.txt", "x" * 1001),
        ("lines.txt", "x" * 600 + "\n" + "y" * 600),
    ):
        (tmp_path / name).write_text(content)
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "' + b"z" * 2000 + b'"}\n' + GOOD)
    with pytest.raises(DataError):
        survey(data(files=[str(tmp_path)]))
    report = survey(data(files=[str(tmp_path)], on_bad_input="skip")).report
    assert (report.records, report.bad_records, report.bad_files) == (5, 2, 0)
