"""What commands answer to wrong input, word for word. All other tests assert exit codes, error classes, keys and paths.

`INFINI_WRITE_MESSAGES=1 .venv/bin/python -m pytest tests/contracts/test_messages.py` writes the answers in messages.txt anew;
a new case is a new line `$ …` there.
"""

import gzip
import os
import re
import shlex
from pathlib import Path

import pytest

from infini_llama.flows.cli.main import main

MESSAGES = Path(__file__).with_name("messages.txt")


def folder_of_mistakes(folder: Path) -> None:
    """A configuration `run.yaml` that works on texts/, and one file per mistake."""
    texts = folder / "texts"
    texts.mkdir()
    (folder / "pictures").mkdir()
    (folder / "pictures" / "picture.png").touch()
    for number in range(40):
        words = " ".join(
            f"word{number}{letter} = {letter * 3}" for letter in "abcdefghij"
        )
        (texts / f"{number}.txt").write_text(f"{words}\n" * 5)
    (folder / "run.yaml").write_text(
        "data: {files: ['texts/*.txt'], sequence_length: 16, tokenizer: {vocab_size: 300}, validation_fraction: 0.2}\n"
    )
    written = {
        "empty.yaml": b"",
        "list.yaml": b"- a\n- b\n",
        "unclosed.yaml": b"data: {source: python-stdlib\n",
        "twice.yaml": b"train:\n  seed: 1\n  seed: 2\n",
        "tag.yaml": b"data: !!python/object/apply:os.system [ls]\n",
        "tab.yaml": b"data:\n\tfiles: []\n",
        "escape.yaml": b'data: "\\UFFFFFFFF"\n',
        "colon.yaml": b"data: a: b\n",
        "loop.yaml": b"a: &a [*a]\n",
        "documents.yaml": b"a: 1\n---\nb: 2\n",
        "merge.yaml": b"data: &d {source: python-stdlib}\nmodel: {<<: *d}\n",
        "nested.json": b'{"data":' + b'{"a":' * 600 + b"1" + b"}" * 601,
        "digits.yaml": b"a: " + b"9" * 5000,
        "nul.yaml": b"a: \x00",
        "latin.yaml": b"data: \xff\n",
        "nested.yaml": b"[" * 5000,
        "laughs.yaml": b"a: &a0 [x]\n"
        + b"".join(
            b"b%d: &a%d [*a%d, *a%d]\n" % (n + 1, n + 1, n, n) for n in range(30)
        ),
        "tagged.yaml": b"train: {seed: !!int '3'}\n",
        "list-as-key.yaml": b"? [a, b]\n: 1\n",
        "dotted.yaml": b"data: {source: python-stdlib}\ntrain.max_steps: 3\n",
        "my run.yaml": b"data: {source: python-stdlib}\n",
        "twice.json": b'{"data": {}, "data": {}}',
        "run.toml": b"a = 1",
        "latin.txt": b"caf\xe9",
        "empty.txt": b"",
        "line.jsonl": b'{"text": "one"}\n{"text": \n',
        "column.jsonl": b'{"body": "one"}\n',
        "cut.txt.gz": gzip.compress(b"text " * 1000, mtime=0)[:40],
        "empty.json": b"{}",
        "few.tiktoken": b"YQ== 0\n",
        "ranks.tiktoken": b"YQ== 0\nb 1\n",
    }
    for name, content in written.items():
        (folder / name).write_bytes(content)


def answer(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Exit code and error, without the usage or the progress above it."""
    try:
        code = main(shlex.split(command)[1:])
    except SystemExit as left:
        code = left.code
    out, messages = capsys.readouterr()
    assert not out, command
    return f"{code}: {re.split(r'^infini-llama(?: [a-z]+)?: ', messages, flags=re.MULTILINE)[-1].strip()}"


def test_messages_for_wrong_input_match_the_snapshot(tmp_path, monkeypatch, capsys):
    folder_of_mistakes(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(tmp_path / "home"))
    recorded = MESSAGES.read_text()
    parts = []
    for line in recorded.splitlines():
        if line.startswith("$ "):
            parts.append(
                f"{line}\n{answer(line[2:], capsys)}\n".replace(str(tmp_path), "/here")
            )
        elif line.startswith("#"):
            parts.append(f"{line}\n")
    answers = "\n".join(parts)
    if os.environ.get("INFINI_WRITE_MESSAGES"):
        MESSAGES.write_text(answers)
    assert answers == MESSAGES.read_text()
    assert "Traceback" not in answers and "unexpected" not in answers
