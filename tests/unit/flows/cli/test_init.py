"""The configuration that init writes."""

import gzip
import re

import pytest

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.loading import load_config
from infini_llama.configs.schema.sources import TextConfig
from infini_llama.flows.cli.init import sampled_tokens, write_new
from infini_llama.tasks.preprocess.sources.sources import files_of
from support.stages import survey


@pytest.fixture
def begin(tmp_path):
    def write(*texts: str, attention: str = "softmax"):
        for number, text in enumerate(texts):
            (tmp_path / f"my # {number}.txt").write_text(text)
        output = tmp_path / "my.yaml"
        return output, write_new(output, [str(tmp_path / "my *.txt")], attention, tmp_path / "home")

    return write


def test_comments_are_aligned(begin):
    output, record = begin(*(f"a sentence of {n} words. " * 1000 for n in range(20)), attention="infini")
    lines = output.read_text().splitlines()
    assert {line.index(" # ") for line in lines if re.match(r" *\w+:.* # ", line) and "files" not in line} == {31}
    config = load_config(output)
    assert f"max_steps: {record.steps}" in output.read_text()
    assert config.train.micro_batch_size == "auto"
    assert (config.model.attention, config.runtime.name) == ("infini", "my")


def test_of_few_files_one_is_held_out(begin):
    """A fraction of three documents is often none."""
    output, _ = begin("a short one. ", *(f"a sentence of {n} words. " * 1000 for n in range(2)))
    data = load_config(output).data
    assert len(data.validation_files) == 1 and "my # 0" not in data.validation_files[0]
    corpus = survey(data.model_dump(mode="json"))
    assert [len(corpus.train), len(corpus.validation)] == [2, 1]


def test_one_document_is_reported_before_building(begin):
    _, record = begin("a sentence of some words. " * 1000)
    assert "data.validation_files" in record.warning


@pytest.mark.parametrize("name", ["my.txt", "my", "my conf.yaml", "-my.yaml", "nowhere/my.yaml"])
def test_a_name_that_run_would_refuse_is_refused(tmp_path, name):
    (tmp_path / "my.txt").write_text("a sentence of some words. " * 1000)
    output = tmp_path / name
    with pytest.raises(ConfigError):
        write_new(output, [str(tmp_path / "*.txt")], "softmax", tmp_path / "home")
    assert [path.name for path in tmp_path.iterdir()] == ["my.txt"]


@pytest.mark.parametrize("name", ["2024", "null", "1e3"])
def test_a_name_that_yaml_takes_for_something_else(tmp_path, name):
    (tmp_path / "my.txt").write_text("a sentence of some words. " * 1000)
    output = tmp_path / f"{name}.yaml"
    write_new(output, [str(tmp_path / "*.txt")], "softmax", tmp_path / "home")
    assert load_config(output).runtime.name == name


def test_too_little_text_is_refused(begin, tmp_path):
    with pytest.raises(DataError, match="2,048"):
        begin("hi")
    assert not (tmp_path / "my.yaml").exists()


def test_compressed_text_counts_as_what_it_unpacks_to(tmp_path):
    text = "".join(f"a sentence of {n} words. " for n in range(50_000))
    (tmp_path / "plain.txt").write_text(text)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(text.encode()))
    plain, packed = (
        sampled_tokens(files_of(TextConfig(files=[str(tmp_path / name)]))[0]) for name in ("plain.txt", "packed.txt.gz")
    )
    assert plain == int(len(text) / 3.5) and abs(packed - plain) <= 1
