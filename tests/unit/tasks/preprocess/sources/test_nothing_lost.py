"""Text that could be lost without a word is damage, counted or read; names and keys of others cannot break or steer the output."""

import bz2
import gzip
import json
import logging
import lzma
import os
import tarfile
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infini_llama.configs.errors import DataError, escaped
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.flows.cli.main import main
from infini_llama.tasks.preprocess.stage import log_left_out, preprocess
from support.damage import flip
from support.stages import survey
from support.texts import write_files, write_lines


@pytest.mark.parametrize("on_bad_input", ["fail", "skip"])
@pytest.mark.parametrize("name", ["x.tar", "x.TAR.gz", "x.tgz", "x.zip"])
def test_an_archive_is_refused_and_not_read_as_a_text(
    tmp_path: Path, name: str, on_bad_input: Literal["fail", "skip"]
) -> None:
    (tmp_path / "fine.txt").write_text("a text " * 50)
    (tmp_path / name).write_text("a file's name, and its text")
    with pytest.raises(DataError, match=rf"{name} is an archive; unpack it"):
        survey(
            DataConfig(
                files=[f"{tmp_path}/*"],
                validation_fraction=0.5,
                on_bad_input=on_bad_input,
            )
        )


@pytest.mark.parametrize("name", ["shard-1.tar.jsonl", "from.zip.jsonl"])
def test_a_file_that_came_out_of_an_archive_is_read(tmp_path: Path, name: str) -> None:
    file = write_lines(tmp_path / name, ["a text"] * 4)
    assert survey(DataConfig(files=[file])).documents == ["a text"] * 4


@pytest.mark.parametrize("on_bad_input", ["fail", "skip"])
def test_what_is_packed_is_refused_whatever_its_name(
    tmp_path: Path, on_bad_input: Literal["fail", "skip"]
) -> None:
    (tmp_path / "fine.txt").write_text("a text " * 50)
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "fine.txt")
    tar = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar").unlink()
    lines = b'{"text": "fine"}\n' * 9
    packed = {
        "a.txt": tar,
        "b.txt.gz": gzip.compress(tar),
        "c.jsonl": gzip.compress(lines),
        "d.csv": b"PK\x03\x04 zip",
    }
    packed |= {
        "e.txt": lzma.compress(lines),
        "f.json": bz2.compress(lines),
        "g.txt.gz": gzip.compress(packed["c.jsonl"]),
    }
    packed |= {"h.tsv": pa.Codec("zstd").compress(lines, asbytes=True)}
    for name, content in packed.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name} is (an archive|compressed with)"):
            survey(
                DataConfig(
                    files=[str(tmp_path)],
                    validation_fraction=0.5,
                    on_bad_input=on_bad_input,
                )
            )
        (tmp_path / name).unlink()


@pytest.mark.usefixtures("small_units")
def test_a_large_file_with_damaged_ranges_is_one_damaged_file_without_records(
    tmp_path: Path,
) -> None:
    write_lines(tmp_path / "good.jsonl", (f"good {number}" for number in range(200)))
    file = tmp_path / "pages.parquet"
    table = pa.table({"text": [f"document number {number}" for number in range(500)]})
    pq.write_table(
        table,
        file,
        row_group_size=50,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    data = DataConfig(
        files=[str(tmp_path)], on_bad_input="skip", validation_fraction=0.5
    )
    assert len(survey(data).documents) == 700
    for number in (77, 333):
        flip(file, 8 * file.read_bytes().index(b"number %d" % number))
    corpus = survey(data)
    assert sorted(corpus.documents) == sorted(f"good {number}" for number in range(200))
    report = corpus.report
    assert (report.records, report.bad_records, report.bad_files) == (200, 0, 1)
    assert all("pages.parquet is damaged" in line for line in report.bad) and report.bad


def test_a_folder_gives_its_texts_and_counts_its_other_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "deep" / ".git").mkdir(parents=True)
    names = (
        "a.txt",
        "a.html",
        "deep/b.HTML",
        "deep/b.md",
        "c.zip",
        ".hidden.txt",
        "deep/.b",
        "Makefile",
        "state.json",
    )
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / "d.ndjson").write_text('{"text": "a line"}\n')
    (tmp_path / "e.tsv").write_text("id\ttext\n1\ta row\n")
    corpus = survey(DataConfig(files=[str(tmp_path)]))
    report = corpus.report
    assert report.other_files == {".html": 2, ".zip": 1, "hidden": 2, "no ending": 1}
    assert corpus.documents == ["a line", "a row", "a.txt", "deep/b.md"]
    with caplog.at_level(logging.INFO):
        log_left_out(report)
    assert "1 .zip" in caplog.text and "2 hidden" in caplog.text


def test_what_is_left_out_is_of_todays_text(
    data, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not of the text that the dataset was first built from, though it is the same dataset."""
    texts = write_files(
        tmp_path, (f"some text with number {number} " * 9 for number in range(30))
    )
    bad = tmp_path / "bad.jsonl"
    both = data(files=[texts, str(bad)], on_bad_input="skip")
    alone = changed(both, files=[texts])
    bad.write_text('{"text": "it is right"}\n')
    whole = preprocess(both, tmp_path / "home")
    preprocess(alone, tmp_path / "home")
    for text, settings, count in (
        ('{"text": ', both, 1),
        ('{"text": 3}\n' * 2, both, 2),
        ("", alone, 0),
    ):
        bad.write_text(text)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            reference = preprocess(settings, tmp_path / "home")
        assert reference.built == () and reference.path != whole.path
        assert (
            reference.text.left_out.bad_records + reference.text.left_out.bad_files
            == count
        )
        assert caplog.text.count("bad.jsonl") == count


def test_held_out_files_and_their_copies_are_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("held out")
    for name, text in {
        "a": "held out",
        "b": "held out",
        "c": "twice",
        "d": "twice",
        "e": "once",
    }.items():
        (tmp_path / f"{name}.txt").write_text(text)
    data = DataConfig(
        files=[str(tmp_path / "*.txt")], validation_files=[str(tmp_path / "held.txt")]
    )
    for deduplicate, kept in ((False, 3), (True, 2)):
        corpus = survey(changed(data, deduplicate=deduplicate))
        assert (corpus.report.also_validation, corpus.report.duplicates) == (2, 1)
        assert len(corpus.train) == kept and corpus.validation == ["held out"]
    with pytest.raises(DataError, match=r"data\.validation_files"):
        survey(changed(data, validation_files=["nothing.txt"]))


def test_names_that_are_not_utf_8_are_read_cached_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "texts" / os.fsdecode(b"caf\xe9")
    folder.mkdir(parents=True)
    for number in range(40):
        file = folder / os.fsdecode(b"\xff%d\x1b[31m.txt" % number)
        file.write_text(f"some text with number {number} " * 20)
    packed = pa.Codec("zstd").compress(b'{"text": "a compressed text"}\n', asbytes=True)
    (folder / os.fsdecode(b"\xff.jsonl.zst")).write_bytes(packed)
    monkeypatch.setattr("infini_llama.tasks.preprocess.tokens.parts.SETTLED", 0)
    config = tmp_path / "config.yaml"
    settings = {
        "files": [str(tmp_path / "texts")],
        "sequence_length": 64,
        "validation_fraction": 0.3,
    }
    config.write_text(
        json.dumps({"data": settings, "runtime": {"home": str(tmp_path / "home")}})
    )
    for _ in range(2):
        assert main(["preprocess", str(config)]) == 0
    (folder / os.fsdecode(b"bad\xfe\x1b[31m.jsonl")).write_bytes(
        b'{"\\ud800\x7f": 1}\n'
    )
    for on_bad_input, code in (("fail", 65), ("skip", 0)):
        assert (
            main(["preprocess", str(config), f"data.on_bad_input={on_bad_input}"])
            == code
        )
        printed = capfd.readouterr()
        assert "bad\\xfe\\x1b[31m.jsonl" in printed.err
        assert "\x1b" not in printed.err + printed.out


def test_control_characters_are_escaped_and_text_is_not() -> None:
    assert (
        escaped("\x1b[31m\x07\r\x9b\udcff\u202e")
        == "\\x1b[31m\\x07\\r\\x9b\\udcff\\u202e"
    )
    assert escaped("grün 日本 👩\u200d👧\n\ttext") == "grün 日本 👩\u200d👧\n\ttext"


def test_text_that_is_too_little_once_some_is_skipped_says_what_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_files(tmp_path / "text", ["short text"] * 3 + ["gr\xf6\xdfer"])
    (tmp_path / "text" / "3.txt").write_bytes(b"gr\xf6\xdfer " * 900)
    write_files(tmp_path / "held", ["another text " * 200])
    data = DataConfig(
        files=[str(tmp_path / "text")],
        validation_files=[str(tmp_path / "held")],
        on_bad_input="skip",
        sequence_length=64,
    )
    with pytest.raises(DataError) as raised:
        preprocess(data, tmp_path / "home")
    assert "3.txt" in caplog.text
    assert "validation_fraction" not in str(raised.value)
