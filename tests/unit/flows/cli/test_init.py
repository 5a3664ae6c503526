"""The configuration that init writes."""

import re

import pytest

from infini_llama.configs.loading import load_config
from infini_llama.flows.cli.init import write_beginning


@pytest.fixture
def begin(tmp_path):
    def write(*texts: str, attention: str = "softmax"):
        for number, text in enumerate(texts):
            (tmp_path / f"my # {number}.txt").write_text(text)
        output = tmp_path / "my.yaml"
        return output, write_beginning(output, [str(tmp_path / "my *.txt")], "my", attention, tmp_path / "home")

    return write


def test_comments_are_aligned(begin):
    output, record = begin("a sentence of some words. " * 1000, attention="infini")
    lines = output.read_text().splitlines()
    assert {line.index(" # ") for line in lines if re.match(r" *\w+:.* # ", line) and "files" not in line} == {31}
    config = load_config(output)
    assert record.warning is None and f"max_steps: {record.steps}" in output.read_text()
    assert (config.model.attention, config.runtime.name) == ("infini", "my")


def test_too_little_text_is_reported_before_building(begin):
    _, record = begin("hi")
    assert record.warning.startswith("2 bytes are too little text: one row of data.sequence_length=512 takes about")
