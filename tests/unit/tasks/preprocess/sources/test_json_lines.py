"""Lines of JSON that are parsed many at a time are those that are parsed one by one, whatever is in the file."""

import io
import json
import random

import pytest

from infini_llama.tasks.preprocess.sources import json_lines, texts

ODD = [
    b"",
    b"  \r",
    b"broken",
    b"[1",
    b"2]",
    b'{"text": "a"},{"text": "b"}',
    b'{"text": "no',
    b'end"}',
    b'{"text": 5}',
    b'"plain"',
    b'{"other": "x"}',
    b'{"text": null}',
    b'{"text": "\\ud800"}',
    b'{"text": NaN}',
    b'\xef\xbb\xbf{"text": "after a mark"}',
    b"\xff",
    b'{"text": "t"}\r',
    b'{"text": "' + b"a b " * 300 + b'"}',
    b'{"text": "' + b"x" * 300 + b'"}',
]


@pytest.fixture
def small(monkeypatch):
    for name, value in {"LONGEST_RECORD": 900, "LONGEST_DOCUMENT": 400, "LONGEST_WORD": 120}.items():
        monkeypatch.setattr(texts, name, value)


def made(choose: random.Random) -> bytes:
    """A file that is in order for the most part, or none of it."""
    odd = choose.choice((0.03, 0.9))
    lines = [
        choose.choice(ODD)
        if choose.random() < odd
        else json.dumps({"text": "wö rd " * choose.randint(0, 30)}, ensure_ascii=choose.random() < 0.5).encode()
        for _ in range(choose.randint(0, 30))
    ]
    return b"\n".join(lines) + b"\n" * choose.randint(0, 2)


def one_by_one(data: bytes) -> list[str | texts.Fault]:
    """Every line by itself, as a file would give it whose lines were all odd."""
    found: list[str | texts.Fault] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if len(line) > texts.LONGEST_RECORD:
            found.append(texts.Fault(f"has a line longer than {texts.LONGEST_RECORD:,} bytes (line {number})"))
        elif line.strip():
            record = json_lines._parsed(line, "text", lambda number=number: f"line {number}")
            found += [record] if isinstance(record, texts.Fault) else texts.pieces(record)
    return found


@pytest.mark.parametrize("block", [1, 50, 300, 800])  # always less than a record may have
def test_batches_are_the_lines_one_by_one(small, monkeypatch, block):
    monkeypatch.setattr(texts, "BLOCK", block)
    choose = random.Random(block)
    for _ in range(300):
        data = made(choose)
        batches = list(json_lines.line_batches(io.BytesIO(data), "text"))
        assert [record for records in batches for record in records] == one_by_one(data), data


@pytest.mark.parametrize(
    "data",
    [
        b'{"text": [{}\n{}], "text": "x"}\n{"text": "a"},{"text": "b"}\n',
        b'{"text": "a"} {"text": "b"}\n{"text": "c"\n}\n',
    ],
)
def test_two_lines_that_are_one_value_do_not_pass_for_two(data):
    """Together with a line that is two values, the number of values is that of the lines."""
    [records] = json_lines.line_batches(io.BytesIO(data), "text")
    assert [type(record) for record in records] == [texts.Fault] * 3


def test_the_text_of_a_line_is_that_of_the_standard_parser():
    lines = [
        '{"text": "\\u00e9\\ud83d\\ude42\\n\\u0000", "n": 1e5}',
        '{"a": {"text": 1}, "text": "x", "b": [null, true]}',
        '{"text": ""}',
    ]
    [records] = json_lines.line_batches(io.BytesIO("\n".join(lines).encode()), "text")
    assert list(records) == [json.loads(line)["text"] for line in lines]


def test_ordinary_lines_are_not_parsed_one_by_one(monkeypatch):
    monkeypatch.setattr(json_lines, "_parsed", lambda *_: pytest.fail("one by one"))
    data = b"".join(b'{"id": %d, "text": "number %d"}\n' % (number, number) for number in range(1000))
    [records] = json_lines.line_batches(io.BytesIO(data), "text")
    assert records == [f"number {number}" for number in range(1000)]
