"""The configuration that init writes: its comments and sizes, for this text and for machines that are not here."""

import gzip
import json
import re

import pandas as pd
import pytest

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.loading import load_config
from infini_llama.configs.schema.sources import TextConfig
from infini_llama.configs.variables import without_variables
from infini_llama.flows.cli import text_sample
from infini_llama.flows.cli.init import write_continuation, write_new
from infini_llama.flows.cli.model_size import (
    MOST_EPOCHS,
    TOKENS_PER_PARAMETER,
    Overrides,
)
from infini_llama.flows.cli.text_sample import (
    BYTES_PER_TOKEN,
    sample_text,
    sampled_tokens,
)
from infini_llama.model.config import parameters
from infini_llama.tasks.estimate.run import model_of
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.sources import source_of
from support.hub import write_llama
from support.machines import GIB, H100, T4, lay_out
from support.remote import WebServer
from support.stages import survey


@pytest.fixture
def begin_on(tmp_path):
    def write(gpus, name="my", **overrides):
        folder = tmp_path / name
        (folder / "texts").mkdir(parents=True)
        for number in range(50):
            (folder / f"texts/{number}.txt").write_text(
                f"a sentence of {number} words. " * 400
            )
        machine = lay_out(folder, gpus=gpus)
        output = folder / f"{name}.yaml"
        record = write_new(
            output,
            [str(folder / "texts")],
            "softmax",
            folder / "home",
            Overrides(**overrides),
            machine,
        )
        config = load_config(output)
        return (
            record,
            config,
            plan_environment(config, probe(folder / "home", config, machine)),
        )

    return write


@pytest.mark.parametrize(
    "name",
    ["emo 😀", "next\x85line", 'quoted "\\'],
    ids=["emoji", "next line", "quotes"],
)
def test_every_path_can_be_read_back(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"a sentence of {number} words. " * 400)
    output = tmp_path / "my.yaml"
    write_new(
        output,
        [str(folder)],
        "softmax",
        tmp_path / "home",
        Overrides(),
        lay_out(tmp_path, gpus=[]),
    )
    data = load_config(output).data
    assert [
        path
        for path in (*data.files, *data.validation_files)
        if str(folder) not in path
    ] == []


@pytest.mark.parametrize("pattern", ["$TEXTS/a$$b", "{folder}/a$$b/*.txt"])
def test_files_are_read_as_the_configuration_reads_them(tmp_path, monkeypatch, pattern):
    monkeypatch.setenv("TEXTS", str(tmp_path))
    (tmp_path / "a$b").mkdir()
    for number in range(3):
        text = f"a sentence of {number} words. " * 400
        (tmp_path / "a$b" / f"{number}.txt").write_text(text)
    output = tmp_path / "my.yaml"
    files = [pattern.format(folder=tmp_path)]
    write_new(output, files, "softmax", tmp_path / "home", Overrides())
    config = load_config(output)
    assert config.data.files == files
    corpus = survey(without_variables(config).data)
    assert [len(corpus.train), len(corpus.validation)] == [2, 1]


@pytest.mark.parametrize("kind", [H100, T4], ids=["H100", "T4"])
@pytest.mark.parametrize("count", [1, 3, 6, 8])
@pytest.mark.parametrize("tokens", [None, 2_000_000_000])
def test_every_gpu_has_work_and_the_model_fits(begin_on, kind, count, tokens):
    record, config, plan = begin_on([kind] * count, tokens=tokens)
    assert plan.nproc_per_node == record.workers == count
    assert config.train.global_batch_size % (count * plan.micro_batch_size) == 0
    assert not [
        finding for finding in plan.findings if finding.name in ("memory", "workers")
    ]
    assert record.parameters == parameters(model_of(config))
    if tokens:
        assert abs(record.tokens / tokens - 1) < 0.01
        assert TOKENS_PER_PARAMETER * record.parameters <= tokens
    else:
        assert record.tokens <= 1.1 * MOST_EPOCHS * record.text_tokens


def test_more_text_more_time_and_more_memory_make_larger_models(begin_on):
    few, many = (
        begin_on([H100] * 8, name, tokens=tokens)[0]
        for name, tokens in (("few", 10**8), ("many", 10**11))
    )
    assert few.parameters < many.parameters
    small = {**T4, "memory": 3 * GIB, "free": 3 * GIB}
    assert begin_on([small], "small", tokens=10**11)[0].parameters < many.parameters
    hour, week = (
        begin_on([T4], name, tokens=10**11, hours=hours)[0]
        for name, hours in (("hour", 1.0), ("week", 168.0))
    )
    assert hour.parameters < week.parameters
    asked = begin_on([H100], "asked", parameters=100_000_000)[0]
    assert 5e7 < asked.parameters < 2e8
    for number in (1000, 10**12):
        with pytest.raises(ConfigError, match="--parameters"):
            begin_on([T4], f"of-{number}", parameters=number)


def test_a_setting_that_saves_memory_is_in_the_file(begin_on):
    config = begin_on(
        [{**T4, "memory": int(2.3 * GIB), "free": int(2.3 * GIB)}],
        parameters=29_000_000,
    )[1]
    assert config.train.activation_checkpointing == "full"


def test_a_gpu_that_holds_no_model_is_named(begin_on):
    with pytest.raises(ConfigError, match="no model fits"):
        begin_on([{**T4, "memory": 2 * GIB, "free": GIB // 4}])


@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_the_training_of_a_llama_is_continued_on_every_gpu(tmp_path, count):
    (tmp_path / "texts").mkdir()
    for number in range(50):
        (tmp_path / f"texts/{number}.txt").write_text(
            f"a sentence of {number} words. " * 400
        )
    folder, machine = (
        write_llama(tmp_path / "theirs"),
        lay_out(tmp_path, gpus=[H100] * count),
    )
    output, home = tmp_path / "my.yaml", tmp_path / "home"
    record = write_continuation(
        output, [str(tmp_path / "texts")], str(folder), None, home, Overrides(), machine
    )
    config = load_config(output)
    plan = plan_environment(config, probe(home, config, machine))
    assert plan.nproc_per_node == record.workers == max(1, count)
    assert (
        config.train.global_batch_size % (record.workers * plan.micro_batch_size) == 0
    )
    assert (config.train.init_from, config.data.tokenizer.path) == (
        str(folder),
        str(folder),
    )
    size = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    assert record.text_tokens == size, "its vocabulary is of bytes"
    assert record.tokens <= 1.1 * record.text_tokens
    assert config.train.max_steps == record.steps > config.train.warmup_steps


def test_a_llama_that_fits_nowhere_is_named(tmp_path):
    (tmp_path / "my.txt").write_text("a sentence of some words. " * 1000)
    machine = lay_out(tmp_path, gpus=[{**T4, "memory": 2 * GIB, "free": GIB // 4}])
    folder, output = write_llama(tmp_path / "theirs"), tmp_path / "my.yaml"
    with pytest.raises(ConfigError, match="does not fit"):
        write_continuation(
            output,
            [str(tmp_path / "my.txt")],
            str(folder),
            None,
            tmp_path / "home",
            Overrides(),
            machine,
        )
    assert not output.exists()


def test_an_output_that_exists_is_refused_before_the_model_is_fetched(tmp_path):
    output = tmp_path / "my.yaml"
    output.write_text("kept")
    with pytest.raises(ConfigError, match=str(output)):
        write_continuation(
            output, ["x.txt"], "nobody/nothing", None, tmp_path / "home", Overrides()
        )
    assert output.read_text() == "kept"


@pytest.fixture
def begin(tmp_path):
    def write(*texts: str, name: str = "my.yaml", attention: str = "softmax"):
        for number, text in enumerate(texts):
            (tmp_path / f"my # {number}.txt").write_text(text)
        output = tmp_path / name
        return output, write_new(
            output,
            [str(tmp_path / "my *.txt")],
            attention,
            tmp_path / "home",
            Overrides(),
        )

    return write


def test_comments_are_aligned(begin):
    output, record = begin(
        *(f"a sentence of {n} words. " * 1000 for n in range(20)), attention="infini"
    )
    lines = output.read_text().splitlines()
    assert {
        line.index(" # ")
        for line in lines
        if re.match(r" *\w+:.* # ", line) and "files" not in line
    } == {31}
    assert sum(" # " in line for line in lines) > 10
    config = load_config(output)
    assert f"max_steps: {record.steps}" in output.read_text()
    assert config.train.micro_batch_size == "auto"
    assert (config.model.attention, config.runtime.name) == ("infini", "my")


def test_of_few_files_one_is_held_out(begin):
    """A fraction of three documents is often none."""
    output, _ = begin(
        "a short one. ", *(f"a sentence of {n} words. " * 1000 for n in range(2))
    )
    data = load_config(output).data
    assert len(data.validation_files) == 1 and "my # 0" not in data.validation_files[0]
    corpus = survey(data)
    assert [len(corpus.train), len(corpus.validation)] == [2, 1]


def test_one_document_is_reported_before_building(begin):
    _, record = begin("a sentence of some words. " * 1000)
    assert "data.validation_files" in record.warning


@pytest.mark.parametrize(
    "beside", ["", "A short README. " * 30], ids=["empty", "short"]
)
def test_nearly_all_text_is_not_held_out(begin, beside):
    output, record = begin("a sentence of some words. " * 3000, beside)
    assert load_config(output).data.validation_files == []
    assert record.tokens > record.text_tokens
    assert "data.validation_files" in record.warning


def test_less_of_much_text_is_held_out(tmp_path, monkeypatch):
    """The number of its files says little of how many documents it has."""
    record = json.dumps({"text": "a sentence of some words. " * 20})
    file = tmp_path / "one.jsonl"
    file.write_text(f"{record}\n" * 100)
    text = sample_text([str(file)], tmp_path, None)
    assert text.held_out(256) == {"validation_fraction": 0.2}
    monkeypatch.setattr(text_sample, "MUCH", text.tokens)
    assert text.held_out(256) == {"validation_fraction": 0.05}


def test_a_held_out_url_keeps_its_query(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text("a sentence of some words. " * 1000)
    with WebServer(folder) as server:
        urls = [f"{server.url}/{name}.txt?part=1" for name in ("a", "b")]
        text = sample_text(urls, tmp_path, None)
    assert text.held_out(256) == {"validation_files": urls[:1]}


@pytest.mark.parametrize(
    "name", ["my.txt", "my", "my conf.yaml", "-my.yaml", "nowhere/my.yaml"]
)
def test_a_name_that_run_would_refuse_is_refused(begin, tmp_path, name):
    with pytest.raises(ConfigError):
        begin("a sentence of some words. " * 1000, name=name)
    assert [path.name for path in tmp_path.iterdir()] == ["my # 0.txt"]


@pytest.mark.parametrize("name", ["2024", "null", "1e3"])
def test_a_name_that_yaml_takes_for_something_else(begin, name):
    output, _ = begin("a sentence of some words. " * 1000, name=f"{name}.yaml")
    assert load_config(output).runtime.name == name


def test_too_little_text_is_refused(begin, tmp_path):
    with pytest.raises(DataError, match="2,048"):
        begin("hi")
    assert not (tmp_path / "my.yaml").exists()


def test_a_text_in_another_field_is_found_by_its_name(tmp_path):
    lines = [
        json.dumps({"title": f"t{n}", "body": "some words " * 60}) for n in range(200)
    ]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines))
    output = tmp_path / "my.yaml"
    files = [str(tmp_path / "notes.jsonl")]
    with pytest.raises(DataError, match=r"title, body.* --text-column NAME"):
        write_new(output, files, "softmax", tmp_path / "home", Overrides())
    overrides = Overrides(text_column="body")
    record = write_new(output, files, "softmax", tmp_path / "home", overrides)
    assert record.text_tokens > 10_000
    assert load_config(output).data.text_column == "body"


@pytest.mark.parametrize("kind", ["csv", "parquet", "utf-16"])
def test_text_that_cannot_be_read_is_named(tmp_path, kind):
    rows = {"id": [*range(200)], "content": ["some words of text " * 40] * 200}
    if kind == "csv":
        pd.DataFrame(rows).to_csv(tmp_path / "notes.csv", index=False)
    elif kind == "parquet":
        pd.DataFrame(rows).to_parquet(tmp_path / "notes.parquet")
    else:
        (tmp_path / "notes.txt").write_bytes(("words " * 90_000).encode("utf-16"))
    output = tmp_path / "my.yaml"
    with pytest.raises(DataError, match=r"notes\."):
        write_new(
            output,
            [str(tmp_path / "notes.*")],
            "softmax",
            tmp_path / "home",
            Overrides(),
        )
    assert not output.exists()


def test_epochs_are_of_the_text_that_is_not_held_out(tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text("a sentence of some words. " * 400)
    folder, output = write_llama(tmp_path / "theirs"), tmp_path / "my.yaml"
    record = write_continuation(
        output,
        [str(tmp_path / "*.txt")],
        str(folder),
        None,
        tmp_path / "home",
        Overrides(),
    )
    held_out = load_config(output).data.validation_fraction
    assert record.tokens <= record.text_tokens * (1 - held_out) < 1.1 * record.tokens


def test_another_delimiter_is_named(tmp_path):
    (tmp_path / "notes.csv").write_text("id;text\n" + "0;words\n" * 90)
    with pytest.raises(DataError, match="has fields between semicolons"):
        write_new(
            tmp_path / "my.yaml",
            [str(tmp_path / "notes.csv")],
            "softmax",
            tmp_path / "home",
            Overrides(),
        )


def test_compressed_text_counts_as_what_it_unpacks_to(tmp_path):
    text = "".join(f"a sentence of {n} words. " for n in range(50_000))
    (tmp_path / "plain.txt").write_text(text)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(text.encode()))
    not_text = NotText(tmp_path / "home")
    sections = [
        TextConfig(files=[str(tmp_path / name)])
        for name in ("plain.txt", "packed.txt.gz")
    ]
    inputs = [source_of(section).inputs(not_text) for section in sections]
    plain, packed = (sampled_tokens(of_file.training) for of_file in inputs)
    assert plain == int(len(text) / 3.5) and abs(packed - plain) <= 1


@pytest.mark.parametrize(("ending", "read_whole"), [("jsonl", 0), ("jsonl.gz", 2**20)])
def test_a_large_file_of_little_text_is_not_taken_for_text(
    tmp_path, monkeypatch, ending, read_whole
):
    """Whether it is read in part, as the first, or as a whole."""
    monkeypatch.setattr(text_sample, "SAMPLED_BYTES", 2**16)
    monkeypatch.setattr(text_sample, "READ_WHOLE", read_whole)
    line = json.dumps({"id": "0123456789" * 90, "text": "word " * 20}) + "\n"
    count = 2**21 // len(line)
    path = tmp_path / f"records.{ending}"
    with (gzip.open if ending.endswith("gz") else open)(path, "wt") as file:
        file.write(line * count)
    section = TextConfig(files=[str(path)])
    files = source_of(section).inputs(NotText(tmp_path / "home")).training
    expected = count * len("word " * 20) / BYTES_PER_TOKEN
    assert 0.98 * expected < sampled_tokens(files) < 1.02 * expected
