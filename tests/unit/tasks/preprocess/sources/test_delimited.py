"""CSV and TSV: a TSV has quotes as pandas and Excel write them, or as text, in all of the file; no record is lost without a word."""

import csv
import gzip
import io
import lzma
import tracemalloc
from itertools import chain
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_llama.tasks.preprocess.sources import delimited, formats
from infini_llama.tasks.preprocess.sources.texts import Fault, Unreadable

COLUMNS = {
    "one": lambda texts: {"text": texts},
    "behind numbers": lambda texts: {"id": range(len(texts)), "text": texts},
    "before numbers": lambda texts: {"text": texts, "label": range(len(texts))},
    "behind words": lambda texts: {"lang": ["en"] * len(texts), "text": texts},
}
PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
PACK[".zst"] = lambda data: pa.Codec("zstd").compress(data, asbytes=True)


def read(path: Path) -> list[str | Fault]:
    return list(chain.from_iterable(formats.read(path, "text")))


def written(folder: Path, content: str | bytes, name: str = "x.tsv") -> Path:
    (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    return folder / name


def lines(*texts: str, end: str = "\n") -> str:
    return end.join(
        ["id\ttext", *(f"{number}\t{text}" for number, text in enumerate(texts, 1)), ""]
    )


AS_TEXT = {
    "opened and closed at the edges of other fields": [
        '"Hello, he said',
        "fine",
        'goodbye"',
        "last words",
    ],
    "inside": ["plain", '"Hi" there', "end"],
    "never closed": ['"never closed', *(f"line {number}" for number in range(2, 400))],
    "around some fields that need none": ['"Hello"', "fine", '"bye"'],
    "around some commas": ['"Hello, you"', "fine, too"],
    "docstrings": ['"""Return x."""', 'x = "a"', '"""Begin', "go on", 'end."""'],
    "inches": ['a 5" disk', '"', '""', 'x"'],
}


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("case", AS_TEXT)
def test_quotes_of_a_tsv_that_no_writer_of_tables_puts_are_text(tmp_path, case, ending):
    for end in ("\n", "\r\n"):
        path = written(
            tmp_path,
            PACK[ending](lines(*AS_TEXT[case], end=end).encode()),
            f"x.tsv{ending}",
        )
        assert read(path) == AS_TEXT[case]


TEXTS = [
    'say "hi"',
    '"all of it"',
    "a\ttab",
    "two\nlines",
    "two\r\nlines\r",
    "plain, with comma",
    "'single'",
    "größer 🙂",
    " edge ",
]


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize(
    ("quoting", "texts"),
    [
        ("QUOTE_MINIMAL", TEXTS),
        ("QUOTE_NONNUMERIC", TEXTS),
        ("QUOTE_ALL", TEXTS),
        # Without a doubled quote, the quoted header says that quotes around all fields are syntax.
        ("QUOTE_ALL", ["Hello, you", "fine", "last words"]),
    ],
)
@pytest.mark.parametrize("columns", COLUMNS)
def test_quotes_of_a_tsv_from_pandas_are_none_of_its_text(
    tmp_path, columns, quoting, texts, ending
):
    table = pd.DataFrame(COLUMNS[columns](texts)).to_csv(
        sep="\t", index=False, quoting=getattr(csv, quoting)
    )
    path = written(tmp_path, PACK[ending](table.encode()), f"x.tsv{ending}")
    assert read(path) == texts


EXCEL = (
    'id\ttext\r\n1\t"Hello, you"\r\n2\tfine\r\n3\t"two\nlines, ""quoted"""\r\n4\t""\r\n'
)


def test_quotes_of_a_tsv_from_excel_are_none_of_its_text(tmp_path):
    """It also puts them around each field with a comma."""
    assert read(written(tmp_path, EXCEL)) == [
        "Hello, you",
        "fine",
        'two\nlines, "quoted"',
        "",
    ]
    assert read(written(tmp_path, lines('"Hello, you"', "fine", '"a, b"'))) == [
        "Hello, you",
        "fine",
        "a, b",
    ]
    assert read(written(tmp_path, 'place\ttext\nhere, now\t"Hello, you"\n')) == [
        '"Hello, you"'
    ]


LETTERS = st.text(st.sampled_from('""\t\n\r, abü'), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(LETTERS, min_size=1, max_size=6),
    columns=st.sampled_from([*COLUMNS]),
    at_once=st.sampled_from([1, 7, 2**16]),
)
def test_what_pandas_writes_is_read_or_refused(
    tmp_path_factory, texts, columns, at_once
):
    delimited.READ = at_once  # by default the last of them
    path = tmp_path_factory.mktemp("tsv") / "x.tsv"
    pd.DataFrame(COLUMNS[columns](texts)).to_csv(
        path, sep="\t", index=False, lineterminator="\r\n"
    )
    try:
        assert read(path) == texts
    except Unreadable as refused:
        assert "two ways" in str(refused) and columns in (
            "one",
            "behind words",
            "before numbers",
        )


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(
        st.text(st.sampled_from('"",. ab'), min_size=1, max_size=8),
        min_size=1,
        max_size=8,
    )
)
def test_no_line_of_text_with_quotes_is_lost(tmp_path_factory, texts):
    path = written(tmp_path_factory.mktemp("tsv"), lines(*texts))
    try:
        found = read(path)
    except Unreadable as refused:
        assert "neither all around fields" in str(refused) or "two ways" in str(refused)
    else:
        assert len(found) == len(texts)
        assert (
            found == texts
            or found
            == [
                row[1] for row in csv.reader(io.StringIO(lines(*texts)), delimiter="\t")
            ][1:]
        )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            lines('"say ""hi"" to\nher"', "fine", '"Hi" there'),
            "line 5 has others), nor all text (line 2 has",
        ),
        (
            lines("fine", '"a\ttab"', '"never closed'),
            "line 4 has others), nor all text (line 3 has",
        ),
        (
            '"id"\t"text"\n1\tfine\n2\ta "word" of it\n',
            "line 3 has others), nor all text (line 1 has",
        ),
        (
            'lang\ttext\nen\tfine\nde\t"Hello\nde\tyou"\n',
            "the quote that line 3 opens is closed in line 4",
        ),
        (
            lines('"a table:\n1\tfoo\n2\tbar"', '"say ""hi"" to her"'),
            "the quote that line 2 opens is closed in line 4",
        ),
        ('text\n"Hello\nyou"\n', "the quote that line 2 opens is closed in line 3"),
    ],
)
def test_what_fits_neither_reading_or_both_is_refused_with_its_line(
    tmp_path, content, words
):
    with pytest.raises(Unreadable) as refused:
        read(written(tmp_path, content))
    assert words in str(refused.value)


def test_a_table_in_a_text_is_no_record_if_another_text_has_lines(tmp_path):
    texts = ["a table:\n1\tfoo\n2\tbar", "two\nlines"]
    path = tmp_path / "x.tsv"
    pd.DataFrame({"id": [1, 2], "text": texts}).to_csv(path, sep="\t", index=False)
    assert read(path) == texts


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "x.csv",
            b'id,text\n1,"two\nlines"\n2,"open\nand\n',
            "is damaged in the record that begins in line 4 (unexpected end",
        ),
        (
            "x.csv",
            b'"id" x,text\n1,one\n',
            "is damaged in the record that begins in line 1 (",
        ),
        (
            "x.csv",
            b'"id,text\n1,one\n',
            "is damaged in the record that begins in line 1 (unexpected end",
        ),
        (
            "x.csv",
            b'id,text\n1,"two\nlines"\n\n2,"a"b\n',
            "is damaged in the record that begins in line 5 (",
        ),
        (
            "x.csv",
            b'id,text\n1,"two\nlines"\n2,caf\xe9\n',
            "is not UTF-8 in line 4 (byte 5 of it)",
        ),
        (
            "x.tsv",
            b"id\ttext\r1\ttwo\r2\tcaf\xe9\n",
            "is not UTF-8 in line 3 (byte 5 of it)",
        ),
    ],
)
def test_an_error_names_the_line(tmp_path, monkeypatch, name, content, words):
    monkeypatch.setattr(delimited, "READ", 9)
    with pytest.raises(Unreadable) as refused:
        read(written(tmp_path, content, name))
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("at_once", [1, 2**16])
def test_empty_lines_before_the_header_are_no_rows(
    tmp_path, monkeypatch, end, quoted, at_once
):
    monkeypatch.setattr(delimited, "READ", at_once)
    text = '"a"' if quoted else "a"
    content = end.join(["", "", "id,text", f"1,{text}", "", "2", "3,b", ""])
    first, narrow, last = read(written(tmp_path, content, "x.csv"))
    assert (first, last) == ("a", "b")
    assert "in line 6" in str(narrow)


def test_a_record_with_other_fields_is_named_by_its_first_line(tmp_path):
    found = read(
        written(
            tmp_path,
            'id,text\r\n1,"two\r\nlines"\r\n"2\n3"\r\n\r\n4,good\r5,better',
            "x.csv",
        )
    )
    assert found == [
        "two\r\nlines",
        Fault("has 1 fields instead of 2 in line 4"),
        "good",
        "better",
    ]
    found = read(written(tmp_path, lines("good", 'a "b"\tc', "better")))
    assert found == ["good", Fault("has 3 fields instead of 2 in line 3"), "better"]


@pytest.mark.parametrize("at_once", [1, 2**16])
@pytest.mark.parametrize(
    ("name", "first", "second", "line"),
    [
        ("x.csv", "id,text\n1,a\n", "id,text\n2,b\n", 3),
        ("x.csv", 'id,text\r\n1,"a"\r\n\r\n', '"id","text"\r\n2,b', 4),
        ("x.tsv", "id\ttext\n1\ta\n", "id\ttext\n2\tb\n", 3),
    ],
)
def test_a_header_of_a_joined_file_is_not_a_text(
    tmp_path, monkeypatch, at_once, name, first, second, line
):
    monkeypatch.setattr(delimited, "READ", at_once)
    records = read(written(tmp_path, first + second, name))
    repeated = Fault(f"repeats the header in line {line}, as joined files do")
    assert records == ["a", repeated, "b"]


def test_a_row_with_the_name_of_the_column_is_a_text(tmp_path):
    assert read(written(tmp_path, "text\ntext\na\n", "x.csv")) == ["text", "a"]
    assert read(written(tmp_path, "id,text\n1,text\nid,a\n", "x.csv")) == ["text", "a"]


def test_rows_with_quotes_come_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "READ", 2**16)
    path = written(tmp_path, "id,text\n" + '1,"a, b"\n' * 100, "x.csv")
    assert [len(batch) for batch in formats.read(path, "text")] == [100]


def test_looking_at_quotes_takes_little_memory_however_far_one_is_open(tmp_path):
    path = written(
        tmp_path,
        lines(
            '"open', *("a line of the text that follows " * 20 for _ in range(15_000))
        ),
    )
    tracemalloc.start()
    found = sum(1 for batch in formats.read(path, "text") for _ in batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == 15_001 and peak < 6_000_000, "of 9.7 million bytes"


@pytest.mark.parametrize(
    ("name", "header", "message"),
    [
        (
            "x.csv",
            "id;text",
            r"has fields between semicolons, not commas .*save it with commas",
        ),
        ("x.csv", '"id";"text"', "has fields between semicolons"),
        ("x.csv", "id;text;notes, if any", "has fields between semicolons"),
        ("x.csv", "id|text", "has fields between vertical bars"),
        ("x.csv", "id\ttext", "has fields between tabs, .*set data.format=tsv"),
        (
            "x.tsv",
            "id,text",
            "has fields between commas, not tabs .*set data.format=csv",
        ),
        ("x.csv", "sep=,\nid,text", "begins with Excel's line 'sep='"),
        ("x.csv", "# made in 2026\nid,text", "has no column 'text'"),
    ],
)
def test_another_delimiter_is_named(
    tmp_path: Path, name: str, header: str, message: str
) -> None:
    with pytest.raises(Unreadable, match=message):
        read(written(tmp_path, f"{header}\n0;words\n", name))


def test_a_header_that_was_given_as_the_column_is_refused_by_its_delimiter(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "id;text\n0;words\n", "x.csv")
    with pytest.raises(Unreadable, match="has fields between semicolons"):
        list(formats.read(path, "id;text"))


def test_other_delimiters_in_a_header_with_the_column_are_names(tmp_path: Path) -> None:
    assert read(written(tmp_path, "a;b,text\n0;1,words\n", "x.csv")) == ["words"]
    assert read(written(tmp_path, "text\na;b\n", "x.csv")) == ["a;b"]
