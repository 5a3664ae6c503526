"""The configuration that init writes for machines that are not here: every GPU has work, and the sizes follow from text and machine."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import load_config
from infini_llama.flows.cli.init import (
    MOST_EPOCHS,
    TOKENS_PER_PARAMETER,
    Overrides,
    write_continuation,
    write_new,
)
from infini_llama.model.config import parameters
from infini_llama.tasks.estimate.run import model_of
from infini_llama.tasks.patch_environment.plan import resolve
from infini_llama.tasks.patch_environment.probe import probe
from support.hub import write_llama
from support.machines import GIB, H100, T4, lay_out


@pytest.fixture
def begin(tmp_path):
    def write(gpus, name="my", **overrides):
        folder = tmp_path / name
        (folder / "texts").mkdir(parents=True)
        for number in range(50):
            (folder / f"texts/{number}.txt").write_text(f"a sentence of {number} words. " * 400)
        machine = lay_out(folder, gpus=gpus)
        output = folder / f"{name}.yaml"
        record = write_new(output, [str(folder / "texts")], "softmax", folder / "home", Overrides(**overrides), machine)
        config = load_config(output)
        return record, config, resolve(config, probe(folder / "home", config, machine))

    return write


@pytest.mark.parametrize("kind", [H100, T4], ids=["H100", "T4"])
@pytest.mark.parametrize("count", [1, 3, 6, 8])
@pytest.mark.parametrize("tokens", [None, 2_000_000_000])
def test_every_gpu_has_work_and_the_model_fits(begin, kind, count, tokens):
    record, config, plan = begin([kind] * count, tokens=tokens)
    assert plan.nproc_per_node == record.workers == count
    assert config.train.global_batch_size % (count * plan.micro_batch_size) == 0
    assert not [finding for finding in plan.findings if finding.name in ("memory", "workers")]
    assert record.parameters == parameters(model_of(config))
    if tokens:
        assert abs(record.tokens / tokens - 1) < 0.01
        assert TOKENS_PER_PARAMETER * record.parameters <= tokens
    else:
        assert record.tokens <= 1.1 * MOST_EPOCHS * record.text_tokens


def test_more_text_more_time_and_more_memory_make_larger_models(begin):
    few, many = (begin([H100] * 8, name, tokens=tokens)[0] for name, tokens in (("few", 10**8), ("many", 10**11)))
    assert few.parameters < many.parameters
    small = {**T4, "memory": 3 * GIB, "free": 3 * GIB}
    assert begin([small], "small", tokens=10**11)[0].parameters < many.parameters
    hour, week = (begin([T4], name, tokens=10**11, hours=hours)[0] for name, hours in (("hour", 1.0), ("week", 168.0)))
    assert hour.parameters < week.parameters
    asked = begin([H100], "asked", parameters=100_000_000)[0]
    assert 5e7 < asked.parameters < 2e8


def test_a_gpu_that_holds_no_model_is_named(begin):
    with pytest.raises(ConfigError, match="no model fits"):
        begin([{**T4, "memory": 2 * GIB, "free": GIB // 4}])


@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_the_training_of_a_llama_is_continued_on_every_gpu(tmp_path, count):
    (tmp_path / "texts").mkdir()
    for number in range(50):
        (tmp_path / f"texts/{number}.txt").write_text(f"a sentence of {number} words. " * 400)
    folder, machine = write_llama(tmp_path / "theirs"), lay_out(tmp_path, gpus=[H100] * count)
    output, home = tmp_path / "my.yaml", tmp_path / "home"
    record = write_continuation(output, [str(tmp_path / "texts")], str(folder), None, home, Overrides(), machine)
    config = load_config(output)
    plan = resolve(config, probe(home, config, machine))
    assert plan.nproc_per_node == record.workers == max(1, count)
    assert config.train.global_batch_size % (record.workers * plan.micro_batch_size) == 0
    assert (config.train.init_from, config.data.tokenizer.path) == (str(folder), str(folder))
    assert record.tokens <= 1.1 * record.text_tokens
    assert config.train.max_steps == record.steps > config.train.warmup_steps


def test_a_llama_that_fits_nowhere_is_named(tmp_path):
    (tmp_path / "my.txt").write_text("a sentence of some words. " * 1000)
    machine = lay_out(tmp_path, gpus=[{**T4, "memory": 2 * GIB, "free": GIB // 4}])
    folder, output = write_llama(tmp_path / "theirs"), tmp_path / "my.yaml"
    with pytest.raises(ConfigError, match="does not fit"):
        write_continuation(output, [str(tmp_path / "my.txt")], str(folder), None, tmp_path / "home", machine=machine)
    assert not output.exists()
