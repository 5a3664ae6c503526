"""The configuration that init writes for machines that are not here: every GPU has work, and the sizes follow from text and machine."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import load_config
from infini_llama.flows.cli.init import MOST_EPOCHS, TOKENS_PER_PARAMETER, Overrides, write_beginning
from infini_llama.model.flops import parameters
from infini_llama.tasks.estimate.run import model_of
from infini_llama.tasks.patch_environment.planning.plan import resolve
from infini_llama.tasks.patch_environment.probe.probe import probe
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
        record = write_beginning(
            output, [str(folder / "texts")], name, "softmax", folder / "home", Overrides(**overrides), machine
        )
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
