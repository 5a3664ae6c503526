"""What a tokenizer of others may cost, and that a request to stop is obeyed meanwhile."""

import json
import signal
import threading

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.schema import TokenizerConfig
from infini_llama.tasks.preprocess.tokenizers import limits
from infini_llama.tasks.preprocess.tokenizers import tokenizer as tokenizers
from infini_llama.tasks.preprocess.tokenizers.engines import REFERENCE, open_engine
from infini_llama.tasks.preprocess.tokenizers.limits import within_limits
from support.stages import preprocess


@pytest.fixture
def endless(monkeypatch):
    """Work that ends with the test."""
    monkeypatch.setattr(limits, "POLL", 0.001)
    monkeypatch.setattr(limits, "GRACE", 0.0)
    end = threading.Event()
    yield end.wait
    end.set()


def test_results_and_errors_pass_through():
    assert within_limits(lambda: 3, 10) == 3
    for kind in (KeyError, TimeoutError, SystemExit):
        with pytest.raises(kind):
            within_limits(lambda kind=kind: (_ for _ in ()).throw(kind()), 10)


def test_too_much_time_is_refused(endless, monkeypatch):
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.0)
    monkeypatch.setattr(limits, "CPU_SECONDS_PER_BYTE", 0.0)
    with pytest.raises(DataError, match="processor time"):
        within_limits(endless, 10)


def test_time_in_which_the_processor_does_something_else_does_not_count(monkeypatch):
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.0)
    monkeypatch.setattr(limits, "CPU_SECONDS_PER_BYTE", 1.0)
    monkeypatch.setattr(limits.time, "process_time", lambda: 5.0)
    assert within_limits(lambda: threading.Event().wait(0.15) or "slow", 1) == "slow"


def test_too_much_memory_is_refused(endless, monkeypatch):
    sizes = iter([2**30, 2**31, 2**31 + 500 * 10, 2**31 + 500 * 10 + 1])
    monkeypatch.setattr(limits, "_most_resident", lambda: next(sizes))
    with pytest.raises(DataError, match="memory"):
        within_limits(endless, 10)
    assert next(sizes, None) is None, "what may be taken was"


def test_a_request_to_stop_is_obeyed_meanwhile(endless):
    here = threading.get_ident()
    threading.Timer(0.05, lambda: signal.pthread_kill(here, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        within_limits(endless, 10)


def backtracking():
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    return tokenizer


def test_a_backtracking_pattern_is_named(data, tmp_path):
    backtracking().save(str(tmp_path / "tokenizer.json"))
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number}" + (" " + "a" * 40 + "b" if number == 7 else ""))
    settings = data(files=[f"{tmp_path}/*.txt"], tokenizer={"path": str(tmp_path), "eos": "</s>"})
    with pytest.raises(DataError, match="retry-limit"):
        preprocess(settings, str(tmp_path / "home"))


@pytest.mark.parametrize("engine", [REFERENCE, "gigatoken"])
def test_every_engine_is_within_limits(engine, monkeypatch):
    if engine != REFERENCE:
        pytest.importorskip(engine)
    seen = []
    monkeypatch.setattr(
        "infini_llama.tasks.preprocess.tokenizers.engines.within_limits", lambda work, size: seen.append(size) or work()
    )
    open_engine(engine, tokenizers.train_bpe(["the cat sat"] * 2, 300))([b"the cat", "größer".encode()])
    assert seen == [7 + 8]


def test_a_description_is_parsed_within_limits_and_not_of_any_size(tmp_path, monkeypatch):
    file, seen = tmp_path / "tokenizer.json", []
    file.write_text(json.dumps(json.loads(backtracking().to_str())))
    monkeypatch.setattr(tokenizers, "within_limits", lambda work, size: seen.append(size) or work())
    settings = TokenizerConfig(path=str(file))
    tokenizers.load(settings)
    assert seen == [file.stat().st_size]
    monkeypatch.setattr(tokenizers, "LARGEST", 10)
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.path.*at most 10"):
        tokenizers.load(settings)
