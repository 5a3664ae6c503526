import bz2
import gzip
import io
import json
import logging
import lzma
import random
import tracemalloc
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import DataConfig
from infini_llama.configs.text_formats import DOCUMENT_ENDINGS
from infini_llama.tasks.preprocess.sources import compression, formats, json_texts
from infini_llama.tasks.preprocess.sources import texts as records
from infini_llama.tasks.preprocess.sources.texts import Fault, Unreadable
from infini_llama.tasks.preprocess.stage import log_left_out
from support.stages import survey
from support.texts import compressed, encoded

TEXTS = [
    "first",
    "",
    'with "quotes", commas\tand\nlines',
    "größer 日本語 🙂",
    "[brackets], {braces}",
    "last\n",
]


def read(*given: Any) -> Iterator[str | Fault]:
    return chain.from_iterable(formats.read(*given))


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize(
    "form", ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow"]
)
def test_records_of_every_format_plain_and_compressed_are_the_texts(
    tmp_path, form, ending
):
    path = compressed(encoded(form, TEXTS), tmp_path, f"x.{form}{ending}")
    assert list(read(path, "text")) == TEXTS


@pytest.mark.parametrize(
    "name", ["x.txt", "x.md", "X.MD.GZ", "x.txt.xz", "x.md.zst", "no_ending"]
)
def test_other_text_is_one_document(tmp_path, name):
    path = compressed("# Title\n\nüber".encode(), tmp_path, name)
    assert list(read(path, "text")) == ["# Title\n\nüber"]


def test_an_arrow_file_and_json_in_other_arrangements_are_read(tmp_path):
    table = pa.table({"text": pa.array(TEXTS, pa.large_string())})
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as file:
        file.write_table(table)
    assert list(read(tmp_path / "x.arrow", "text")) == TEXTS
    for number, text in enumerate(
        [
            '"a" {"text": "b"}\n{"text": "c", "n": 1}',
            '["a", "b", {"text": "c"}]',
            " [ ] ",
            "",
        ]
    ):
        (tmp_path / f"{number}.json").write_text(text)
    found = [list(read(tmp_path / f"{number}.json", "text")) for number in range(4)]
    assert found == [["a", "b", "c"], ["a", "b", "c"], [], []]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=40), max_size=12),
    block=st.integers(1, 30),
)
def test_json_is_the_same_however_it_is_cut_into_blocks(tmp_path_factory, texts, block):
    path = tmp_path_factory.mktemp("json") / "x.json"
    path.write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "BLOCK", block)
        assert list(read(path, "text")) == texts


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from("ab\nü日🙂"), max_size=120), longest=st.integers(4, 20)
)
def test_long_text_is_several_documents_that_joined_are_the_text(
    tmp_path_factory, text, longest
):
    folder = tmp_path_factory.mktemp("long")
    (folder / "x.txt").write_bytes(text.encode())
    (folder / "x.jsonl").write_text(json.dumps({"text": text}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "LONGEST_DOCUMENT", longest)
        for name in ("x.txt", "x.jsonl"):
            pieces = list(read(folder / name, "text"))
            assert "".join(map(str, pieces)) == text and all(
                len(str(piece).encode()) <= longest for piece in pieces
            )
            for piece in pieces[:-1]:  # cut at a line's end where there is one
                assert str(piece).endswith("\n") or "\n" not in str(piece)


def test_a_line_beyond_any_record_is_a_fault_and_costs_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LONGEST_RECORD", 100_000)
    with (tmp_path / "x.jsonl").open("wb") as file:
        file.write(
            b'{"text": "good"}\n{"text": "'
            + b"x" * 30_000_000
            + b'"}\n{"text": "after"}\n'
        )
    tracemalloc.start()
    found = list(read(tmp_path / "x.jsonl", "text"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (
        found
        == ["good", Fault("has a line longer than 100,000 bytes (line 2)"), "after"]
        and peak < 6_000_000
    )


@pytest.mark.parametrize("ending", ["txt", "jsonl.gz", "csv", "json", "parquet"])
def test_reading_takes_little_memory_however_large_the_file(
    tmp_path, ending, monkeypatch
):
    monkeypatch.setattr(records, "LONGEST_DOCUMENT", 2**20)
    texts = [f"line {number} of the text\n" * 400 for number in range(1_000)]  # 9 MB
    form = ending.split(".")[0]
    data = "".join(texts).encode() if form == "txt" else encoded(form, texts)
    path = compressed(data, tmp_path, f"x.{ending}")
    size = sum(map(len, texts))
    del texts, data
    tracemalloc.start()
    assert sum(len(str(text)) for text in read(path, "text")) == size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 9_000_000


def test_filters_are_counted_and_told(tmp_path, caplog):
    texts = ["same", "other text", "same", "", "x", "same"]
    (tmp_path / "x.jsonl").write_bytes(encoded("jsonl", texts))
    with caplog.at_level(logging.INFO, logger="infini_llama.preprocess"):
        corpus = survey(DataConfig(files=[str(tmp_path / "x.jsonl")], min_length=2))
        assert "records read" not in caplog.text, "a look at the text is not a build"
        log_left_out(corpus.report)
    assert corpus.documents == ["other text", "same", "same", "same"]
    assert (
        "6 records read: 1 empty, 1 too short, 2 exact duplicates (kept" in caplog.text
    )
    corpus = survey(
        DataConfig(files=[str(tmp_path / "x.jsonl")], min_length=2, deduplicate=True)
    )
    assert corpus.documents == ["other text", "same"] and corpus.report.duplicates == 2


LINES = st.sampled_from(
    [
        '{"text": "one"}',
        '{"text": "größer 日本語"}',
        "",
        "  ",
        "broken {",
        '{"text": ""}',
        '"a text alone"',
        '{"text": "two\\n"}',
        '{"text": "a long line, longer than a part of the file"}',
    ]
)


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(LINES, max_size=20),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
    last=st.booleans(),
    most=st.integers(1, 60),
    block=st.sampled_from([1, 7, 2**20]),
)
def test_the_parts_of_a_file_of_lines_are_its_lines_wherever_it_is_cut(
    tmp_path_factory, lines, end, mark, last, most, block
):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * mark + (end.join(lines) + end * last).encode())
    whole = list(read(path, "text"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "BLOCK", block)
        parts = formats.spans(path, path.stat().st_size, "auto", most) or [None]
        found = [
            record for part in parts for record in read(path, "text", "auto", part)
        ]
    assert found == whole  # with the numbers of their lines in faults
    assert parts == [None] or [first for first, _ in parts[1:]] == [
        end for _, end in parts[:-1]
    ]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_the_parts_of_a_file_of_tables_are_its_rows_and_name_them(tmp_path, form):
    texts, schema = (
        [f"text {number} " * 30 for number in range(50)],
        pa.schema({"text": pa.string()}),
    )
    path = tmp_path / f"x.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(
            pa.table({"text": texts}), path, row_group_size=7, compression="none"
        )
    else:
        with pa.ipc.new_file(str(path), schema) as file:
            file.write_table(pa.table({"text": texts}, schema=schema), max_chunksize=7)
    parts = formats.spans(path, path.stat().st_size, "auto", 4000)
    assert (
        parts is not None
        and len(parts) > 2
        and parts[0][0] == 0
        and all(a[1] == b[0] for a, b in pairwise(parts))
    )
    assert [
        record for part in parts for record in read(path, "text", "auto", part)
    ] == texts
    assert formats.spans(path, path.stat().st_size, "auto", 10**6) is None


def test_the_row_of_a_fault_is_that_of_the_file(tmp_path):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(
        pa.table({"text": list(range(20))}), path, row_group_size=5
    )
    faults = list(read(path, "text", "auto", (2, 3)))
    assert faults == [
        Fault(f"has int instead of text in row {number}") for number in range(11, 16)
    ]


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.csv", "x.txt", "x.json"])
def test_what_is_read_from_its_beginning_is_one_part(tmp_path, name):
    (tmp_path / name).write_bytes(b"x" * 1000)
    assert formats.spans(tmp_path / name, 1000, "auto", 10) is None


def test_the_text_of_a_line_is_that_of_the_standard_parser(tmp_path):
    lines = [
        '{"text": "\\u00e9\\ud83d\\ude42\\n\\u0000", "n": 1e5}',
        '{"a": {"text": 1}, "text": "x", "b": [null, true]}',
        '{"text": ""}',
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert list(read(tmp_path / "x.jsonl", "text")) == [
        json.loads(line)["text"] for line in lines
    ]


@pytest.mark.parametrize("column", ['the "text"', "a\\b", "two\nlines", "ü"])
def test_a_field_may_have_any_name(tmp_path, column):
    lines = [
        json.dumps({"text": "no", column: f"number {number}"}) for number in range(3)
    ]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, "{}"]))
    *texts, fault = read(tmp_path / "x.jsonl", column)
    assert (
        texts == ["number 0", "number 1", "number 2"]
        and isinstance(fault, Fault)
        and "in line 4" in fault.reason
    )


def test_numbers_of_any_length_are_no_text(tmp_path):
    number = "9" * 5000
    (tmp_path / "x.jsonl").write_text(
        f'{{"n": {number}, "text": "a"}}\n{{"text": {number}}}'
    )
    assert list(read(tmp_path / "x.jsonl", "text")) == [
        "a",
        Fault("has int instead of text in line 2"),
    ]
    (tmp_path / "x.json").write_text(f'[{{"n": {number}, "text": "a"}}, {number}]')
    assert list(read(tmp_path / "x.json", "text")) == [
        "a",
        Fault("has int instead of text in value 2"),
    ]


def arrow(*texts: str, new: Any = pa.ipc.new_stream) -> bytes:
    """One record batch per text."""
    sink, schema = io.BytesIO(), pa.schema({"text": pa.string()})
    with new(sink, schema) as writer:
        for text in texts:
            writer.write_batch(pa.record_batch([[text]], schema=schema))
    return sink.getvalue()


LINES = [b'{"text": "first"}\n', b'{"text": "second"}\n', b'{"text": "third"}\n']
PACKED = {
    "gz": [gzip.compress(line) for line in LINES],
    "xz": [lzma.compress(line) for line in LINES],
}
PACKED["bz2"] = [bz2.compress(line) for line in LINES]
PACKED["zst"] = [pa.Codec("zstd").compress(line, asbytes=True) for line in LINES]


@pytest.mark.parametrize("ending", [*PACKED])
@pytest.mark.parametrize(
    "damage", ["header", "cut in the header", "cut at the end", "appended"]
)
def test_a_damaged_later_stream_is_an_error_and_not_the_end(tmp_path, ending, damage):
    first, second, third = PACKED[ending]
    damaged = {
        "header": first + second[:1] + bytes([second[1] ^ 1]) + second[2:] + third,
        "cut in the header": first + second[:3],
        "cut at the end": first + second + third[:-1],
        "appended": first + second + third + b"appended",
    }
    (tmp_path / f"x.jsonl.{ending}").write_bytes(damaged[damage])
    with pytest.raises(Unreadable):
        list(read(tmp_path / f"x.jsonl.{ending}", "text"))


MARK = "\ufeff"


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize(
    "form", ["txt", "md", "rst", "py", "jsonl", "ndjson", "json", "csv", "tsv"]
)
def test_a_byte_order_mark_is_no_text_at_a_files_start_and_text_elsewhere(
    tmp_path, form, ending
):
    texts = [f"first {MARK}", f"{MARK}second"]
    data = (
        "\n".join(texts).encode() if form in DOCUMENT_ENDINGS else encoded(form, texts)
    )
    plain = list(read(compressed(data, tmp_path, f"plain.{form}{ending}"), "text"))
    marked = list(
        read(
            compressed(MARK.encode() + data, tmp_path, f"marked.{form}{ending}"), "text"
        )
    )
    assert marked == plain and MARK in str(plain[0])
    twice = (
        list(
            read(
                compressed(MARK.encode() * 2 + data, tmp_path, f"twice.{form}{ending}"),
                "text",
            )
        )
        if form == "txt"
        else []
    )
    assert twice == [MARK + str(text) for text in plain[: len(twice)]]


@pytest.mark.parametrize(
    "encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]
)
@pytest.mark.parametrize(
    "name", ["x.txt", "x.jsonl", "x.json", "x.csv", "x.tsv", "x.txt.gz"]
)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f'{MARK}"text"\n', "is {}, not UTF-8"),
        ("“text”\nand ASCII", "is not UTF-8.* UTF-16 and UTF-32"),
    ],
    ids=["mark", "no mark"],
)
def test_other_encodings_are_named(tmp_path, name, encoding, content, message):
    path = compressed(content.encode(encoding), tmp_path, name)
    with pytest.raises(Unreadable, match=message.format(encoding[:6].upper())):
        list(read(path, "text"))


def test_xz_streams_longer_than_a_block_are_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "BUFFER", 1000)
    data = random.Random(4).randbytes(30_000).hex().encode() * 3
    (tmp_path / "x.txt.xz").write_bytes(
        lzma.compress(data[:50_000]) + lzma.compress(data[50_000:])
    )
    assert "".join(read(tmp_path / "x.txt.xz", "text")).encode() == data


SKIPPED = b"\x5a\x2a\x4d\x18\x04\x00\x00\x00abcd"  # a zstd frame of another program, as pzstd and seekable files have
PADDED = {
    "gz": [b"", gzip.compress(b""), bytes(512)],
    "bz2": [b"", bz2.compress(b""), bytes(512)],
    "xz": [b"", lzma.compress(b""), bytes(4), bytes(2**17)],
    "zst": [
        b"",
        pa.Codec("zstd").compress(b"", asbytes=True),
        SKIPPED,
        SKIPPED.replace(b"\4\0\0\0abcd", bytes(4)),
    ],
}


@pytest.mark.parametrize(
    ("ending", "between"),
    [
        pytest.param(end, data, id=f"{end}-{number}")
        for end, parts in PADDED.items()
        for number, data in enumerate(parts)
    ],
)
def test_what_compressors_put_between_and_around_streams_is_no_damage(
    tmp_path, ending, between
):
    first, second, third = PACKED[ending]
    before = between if between.strip(b"\0") else b""
    (tmp_path / f"x.jsonl.{ending}").write_bytes(
        before + first + between + second + between + between + third + between
    )
    assert list(read(tmp_path / f"x.jsonl.{ending}", "text")) == [
        "first",
        "second",
        "third",
    ]
    (tmp_path / f"cut.jsonl.{ending}").write_bytes(first + between + second[:-1])
    (tmp_path / f"more.jsonl.{ending}").write_bytes(first + between + b"more")
    for name in ("cut", "more"):
        with pytest.raises(Unreadable, match="is damaged"):
            list(read(tmp_path / f"{name}.jsonl.{ending}", "text"))


def test_padding_of_xz_is_of_multiples_of_four(tmp_path):
    (tmp_path / "x.txt.xz").write_bytes(lzma.compress(b"text") + bytes(6))
    with pytest.raises(Unreadable, match="6 zeros"):
        list(read(tmp_path / "x.txt.xz", "text"))


def frame(
    content: bytes,
    *,
    window: int = 0,
    dictionary: int = 0,
    size: int | None = None,
    has_checksum: bool = False,
) -> bytes:
    """A zstd frame of one raw block (RFC 8878). window: a window descriptor; size: instead of it, one segment of this size."""
    descriptor = bool(dictionary) | has_checksum << 2 | (0 if size is None else 0xA0)
    head = (
        bytes([descriptor])
        + (bytes([window]) if size is None else b"")
        + (bytes([dictionary]) if dictionary else b"")
    )
    head += b"" if size is None else size.to_bytes(4, "little")
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    return b"\x28\xb5\x2f\xfd" + head + block + b"\0" * 4 * has_checksum


LARGE = frame(b"x", window=21 << 3)  # 2^31 bytes, as of zstd --long=31


@pytest.mark.parametrize("on_bad_input", ["fail", "skip"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LARGE, "a zstd window above 128 MiB"),
        (frame(b"x", window=(17 << 3) + 1), "a zstd window above 128 MiB"),
        (frame(b"x", size=2**29), "a zstd window above 128 MiB"),
        (
            SKIPPED
            + PACKED["zst"][0]
            + frame(b"a" * 300)
            + frame(b"", size=0)
            + SKIPPED
            + LARGE,
            "above 128 MiB",
        ),
        (frame(b"x", window=8, dictionary=7), "a zstd dictionary"),
    ],
    ids=["long", "mantissa", "segment", "later", "dictionary"],
)
def test_zstd_that_needs_more_is_refused_and_not_skipped(
    tmp_path, content, words, on_bad_input
):
    (tmp_path / "a.txt").write_text("good " * 100)
    (tmp_path / "b.txt.zst").write_bytes(content)
    with pytest.raises(DataError) as refused:
        survey(DataConfig(files=[str(tmp_path)], on_bad_input=on_bad_input))
    assert str(refused.value).startswith(
        f"{tmp_path}/b.txt.zst was compressed with"
    ) and words in str(refused.value)


def test_zstd_with_the_largest_window_is_read_and_a_damaged_frame_stays_damaged(
    tmp_path,
):
    (tmp_path / "x.txt.zst").write_bytes(frame(b"text", window=17 << 3))
    assert list(read(tmp_path / "x.txt.zst", "text")) == ["text"]
    for number, content in enumerate(
        (
            frame(b"text", has_checksum=True),
            LARGE[:5],
            PACKED["zst"][0] + b"\x28\xb5\x2f\xfd",
        )
    ):
        (tmp_path / f"{number}.txt.zst").write_bytes(content)
        with pytest.raises(Unreadable, match="is damaged"):
            list(read(tmp_path / f"{number}.txt.zst", "text"))


def test_all_of_several_arrow_streams_is_read(tmp_path):
    (tmp_path / "x.arrow").write_bytes(
        arrow("first") + arrow() + arrow("second", "third")
    )
    assert list(read(tmp_path / "x.arrow", "text")) == ["first", "second", "third"]


@pytest.mark.parametrize(
    "content",
    [
        arrow("first", "second")[:-8],
        arrow("first", "second")[:-4],
        arrow("first", "second") + bytes(64),
        arrow("first") + arrow("second")[:-8],
        arrow("first", new=pa.ipc.new_file)[:-1],
    ],
    ids=["no end", "half an end", "zeros", "later stream without end", "cut file"],
)
def test_a_cut_or_continued_arrow_stream_is_damaged(tmp_path, content):
    (tmp_path / "x.arrow").write_bytes(content)
    with pytest.raises(Unreadable):
        list(read(tmp_path / "x.arrow", "text"))


FRAGMENTS = st.sampled_from(
    [
        '{"text":"a"}',
        '{"text":"b"}\n',
        "{",
        "}",
        "\n",
        "\r\n",
        " ",
        ",",
        '"text":"c"',
        '{"text":"}\\n{"}',
        '{"n":{',
        "}}",
        "null",
        '{"text":1}',
    ]
)


@settings(max_examples=200)
@given(fragments=st.lists(FRAGMENTS, max_size=8))
@example(
    fragments=["{", "\n", '"text":"c"', "}", '{"text":"a"}']
)  # two lines and two values, but not one in each
def test_lines_that_are_parsed_together_are_those_parsed_one_by_one(
    tmp_path_factory, fragments
):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_text("".join(fragments), newline="")
    together = list(read(path, "text"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_texts, "_parsed_together", lambda *_: None)
        assert list(read(path, "text")) == together
