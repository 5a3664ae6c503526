"""Fast engines: the same ids as `tokenizers`, or they are not used."""

import errno
import json
import logging
import shutil
import subprocess
import sys
from importlib.metadata import version
from itertools import count
from types import ModuleType

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess import stage
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.storage.artifacts import read_dataset
from infini_llama.tasks.tokenizers import engines
from infini_llama.tasks.tokenizers.engines import (
    EngineDiffers,
    choose_engine,
    compare,
    open_engine,
)
from support.texts import write_files
from support.tokenizer_kinds import train_bpe
from support.waiting import wait_until

pytest.importorskip("gigatoken")
STOPPED_WHILE_CHECKING = """
import os, signal, sys, threading, time
from pathlib import Path
from infini_llama.tasks.tokenizers import engines
from infini_llama.configs.schema import TokenizerConfig
from infini_llama.tasks.tokenizers.tokenizer import train

class Stopped(BaseException):
    pass

def stop(*_):
    raise Stopped

signal.signal(signal.SIGTERM, stop)
tokenizer = train(["a line of words"] * 50, TokenizerConfig(vocab_size=300))
threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    engines.golden = lambda tokenizer: [b"a line of words " * 100] * 20_000
    engines.choose_engine(tokenizer, True, Path(sys.argv[1]))
except Stopped:
    print("stopped", flush=True)
    os._exit(0)
"""
# gigatoken passes its check and is wrong for a text with WRONG. At one with WAIT it creates a file and waits until that is removed.
PREPARING = """
import sys, time
from pathlib import Path
import numpy as np
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess import stage
from infini_llama.tasks.tokenizers import engines
from infini_llama.tasks.preprocess.tokens import parts

home, data, sampled, waiting = sys.argv[1:]
right = engines.gigatoken_of

def broken(description):
    encode = right(description)

    def wrong(texts):
        if any(b"WAIT" in text for text in texts):
            Path(waiting).touch()
            while Path(waiting).exists():
                time.sleep(0.05)
        ids, offsets = encode(texts)
        split = zip(texts, np.split(ids, offsets[1:-1]))
        several = [np.append(one, 1) if b"WRONG" in text else one for text, one in split]
        return np.concatenate(several), np.cumsum([0, *map(len, several)])

    return wrong

engines.gigatoken_of, engines.compare, engines.SAMPLED = broken, lambda *_: None, int(sampled)
stage.WORTH_A_FAST_ENGINE, parts.RUN_BYTES, parts.PER_FILE = 1, 1500, 0
print(stage.preprocess(DataConfig.model_validate_json(data), Path(home)).path)
"""


def test_the_bytes_are_the_same_with_every_engine(
    data, tmp_path, digests, small_parts, monkeypatch
):
    first = preprocess(data(), tmp_path / "slow")
    monkeypatch.setattr(stage, "WORTH_A_FAST_ENGINE", 1)
    second = preprocess(data(num_workers=2), tmp_path / "fast")
    assert first == second
    assert digests(tmp_path / "slow" / "datasets") == digests(
        tmp_path / "fast" / "datasets"
    )
    slow, fast = (
        read_dataset(tmp_path / name / first.path).meta.engine
        for name in ("slow", "fast")
    )
    assert (slow.name, fast.name, fast.refused) == ("tokenizers", "gigatoken", {})


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.6])
def test_a_stop_request_during_the_check_is_not_the_engines_fault(tmp_path, seconds):
    command = [
        sys.executable,
        "-c",
        STOPPED_WHILE_CHECKING,
        str(tmp_path),
        str(seconds),
    ]
    child = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert child.stdout == "stopped\n" and not list(tmp_path.iterdir()), child.stderr


TEXTS = ["the cat sat on the mat", "größer 日本語 🙂", "<|endoftext|> in the text", ""]
ENCODED = [text.encode() for text in TEXTS]


def longer(encode, chosen):
    """An engine like another one, but for an id too many where `chosen` says so."""

    def wrong(texts):
        ids, offsets = encode(texts)
        several = [
            np.append(one, 1) if chosen(text) else one
            for text, one in zip(texts, np.split(ids, offsets[1:-1]), strict=True)
        ]
        return np.concatenate(several), np.cumsum([0, *map(len, several)])

    return wrong


@pytest.fixture
def wrong(monkeypatch):
    """An engine that gives one id too many for a text with an x in it; installed under a real engine's name."""
    right = engines.gigatoken_of

    def broken(description):
        return longer(right(description), lambda text: b"x:" in text)

    monkeypatch.setattr(engines, "gigatoken_of", broken)


def test_an_engine_that_differs_is_refused_once_and_for_all(
    wrong, tmp_path, caplog, monkeypatch
):
    tokenizer, compared = train_bpe(TEXTS * 3, 300), []
    monkeypatch.setattr(
        engines, "golden", lambda tokenizer: compared.append(1) or [*ENCODED, b"{x: 1}"]
    )
    with caplog.at_level(logging.WARNING):
        chosen = choose_engine(tokenizer, True, tmp_path)
    assert chosen.name == "tokenizers" and "other ids" in chosen.refused["gigatoken"]
    assert "gigatoken" in caplog.text
    [note] = tmp_path.iterdir()
    for damage in (
        lambda: None,
        lambda: note.write_bytes(b"\xff"),
        lambda: (note.unlink(), note.mkdir()),
    ):
        damage()
        assert (
            choose_engine(tokenizer, True, tmp_path).name == "tokenizers"
            and len(compared) == 1
        )


@pytest.fixture
def fast(monkeypatch):
    """The fast engine is used for little text, too."""
    monkeypatch.setattr(stage, "WORTH_A_FAST_ENGINE", 1)


def slow(data, home, monkeypatch):
    """The dataset as the reference engine makes it."""
    with monkeypatch.context() as patch:
        patch.setattr(stage, "WORTH_A_FAST_ENGINE", 10**9)
        return preprocess(data, home)


def test_a_difference_found_during_the_build_switches_to_the_reference(
    wrong, fast, data, tmp_path, digests, monkeypatch, small_parts
):
    monkeypatch.setattr(engines, "compare", lambda *_: None)  # a check that saw nothing
    monkeypatch.setattr(engines, "SAMPLED", 3)
    second = preprocess(data(), tmp_path / "fast")
    first = slow(data(), tmp_path / "slow", monkeypatch)
    assert first == second
    assert digests(tmp_path / "slow" / "datasets") == digests(
        tmp_path / "fast" / "datasets"
    )
    used = read_dataset(tmp_path / "fast" / second.path).meta.engine
    assert used.name == "tokenizers" and "gigatoken" in used.refused


def test_a_difference_leaves_another_preparation_its_units_and_both_switch_to_the_reference(
    fast, data, corpus, tmp_path, digests, monkeypatch, small_parts
):
    frozen = (
        tmp_path
        / "one"
        / slow(data(), tmp_path / "one", monkeypatch).path
        / "tokenizer.json"
    )
    home, waiting, folders = tmp_path / "home", tmp_path / "waiting", []
    for last in ("WAIT " * 500, "WRONG " * 500):
        folders.append(shutil.copytree(corpus, tmp_path / f"text-{len(folders)}"))
        (folders[-1] / "text-050.txt").write_text("WRONG, and not sampled")
        (folders[-1] / "text-099.txt").write_text(last)
    settings = [
        data(files=[str(folder)], tokenizer={"path": str(frozen)}, num_workers=1)
        for folder in folders
    ]

    def start(number: int, sampled: int) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-c",
            PREPARING,
            home,
            settings[number].model_dump_json(),
            str(sampled),
            waiting,
        ]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    first = start(0, sampled=10**9)
    wait_until(lambda: waiting.exists() or first.poll() is not None)
    assert waiting.exists(), first.communicate()
    assert list(home.glob("units/*/*/manifest.json"))
    second = start(1, sampled=1)
    printed = [
        second.communicate(timeout=100),
        waiting.unlink(),
        first.communicate(timeout=100),
    ]
    assert (second.returncode, first.returncode) == (0, 0), printed
    for section in settings:
        path = slow(section, tmp_path / "slow", monkeypatch).path
        assert digests(home / path) == digests(tmp_path / "slow" / path)


@pytest.fixture
def late(monkeypatch):
    """gigatoken, that passes its check and is right for the first text alone; the 21st is sampled."""
    right = engines.gigatoken_of

    def broken(description):
        number = count()
        return longer(right(description), lambda _: next(number) > 0)

    monkeypatch.setattr(engines, "compare", lambda *_: None)
    monkeypatch.setattr(engines, "SAMPLED", 20)
    monkeypatch.setattr(engines, "gigatoken_of", broken)


def test_a_failure_after_a_mismatch_leaves_no_wrong_ids_in_the_next_dataset(
    late, fast, data, tmp_path, digests, monkeypatch, small_parts
):
    home, remember = tmp_path / "fast", stage.remember_comparison

    def dying(*arguments):
        remember(*arguments)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(stage, "remember_comparison", dying)
        with pytest.raises(OSError, match="Input/output error"):
            preprocess(data(), home)
    assert list(home.glob("units/*/*/manifest.json"))  # wrong from the second text on
    monkeypatch.setattr(
        engines,
        "version",
        lambda name: "99" if name == engines.REFERENCE else version(name),
    )
    reference = preprocess(data(), home)
    assert slow(data(), tmp_path / "slow", monkeypatch) == reference
    assert digests(home / "datasets") == digests(tmp_path / "slow" / "datasets")


def test_units_of_an_engine_that_is_refused_later_are_in_no_later_dataset(
    late, fast, data, corpus, tmp_path, digests, monkeypatch, small_parts
):
    frozen = (
        tmp_path
        / "one"
        / slow(data(), tmp_path / "one", monkeypatch).path
        / "tokenizer.json"
    )
    text = shutil.copytree(corpus, tmp_path / "text")
    settings = data(files=[str(text)], tokenizer={"path": str(frozen)})
    monkeypatch.setattr(engines, "SAMPLED", 1000)
    # Wrong from the second text on, and not caught.
    earlier = preprocess(settings, tmp_path / "home").path
    tokenizer = Tokenizer.from_file(str(tmp_path / "home" / earlier / "tokenizer.json"))
    engines.remember_comparison(
        tokenizer, True, tmp_path / "home" / "engine-checks", "another text showed it"
    )
    (text / "text-99-tomorrow.txt").write_text(
        "another day, and what it brought " * 30, encoding="utf-8"
    )
    reference = preprocess(settings, tmp_path / "home")
    slow(settings, tmp_path / "fresh", monkeypatch)
    assert digests(tmp_path / "home" / reference.path) == digests(
        tmp_path / "fresh" / reference.path
    )


def test_one_document_of_so_many_is_sampled_over_all_batches(wrong, monkeypatch):
    monkeypatch.setattr(engines, "SAMPLED", 4)
    encode = open_engine("gigatoken", train_bpe(TEXTS * 3, 300), True)
    encode([b"a", b"x:", b"x:"])
    with pytest.raises(EngineDiffers, match="x:"):
        encode([b"a", b"x:"])


def test_characters_of_newer_unicode_versions_use_the_reference_engine():
    texts = ['"\U00016ed1",', "no such character", "größer", "\U0003298dไ"]
    tokenizer = train_bpe(texts * 50, 300)
    slow = engines.reference(engines.encoder_of(tokenizer, True))
    fast = open_engine("gigatoken", tokenizer, True)
    raw = engines.gigatoken_of(engines.encoder_of(tokenizer, True).to_str())
    encoded = [text.encode() for text in texts]
    for found, right in zip(fast(encoded), slow(encoded), strict=True):
        assert found.tolist() == right.tolist()
    assert raw(encoded)[0].tolist() != slow(encoded)[0].tolist()


def test_marks_that_a_normalizer_orders_otherwise_use_the_reference_engine():
    """Lao and N'Ko marks: gigatoken 0.10.0 and `tokenizers` 0.23.3 have other tables for NFC."""
    described = json.loads(train_bpe(["ab\u0301 e\u0eba"] * 50, 300).to_str())
    described["normalizer"] = {"type": "NFC"}
    tokenizer = Tokenizer.from_str(json.dumps(described))
    encoded = ["e\u0eba\u0301".encode(), "e\u07fd\u0301".encode()]
    slow = engines.reference(engines.encoder_of(tokenizer, True))(encoded)[0].tolist()
    raw = engines.gigatoken_of(engines.encoder_of(tokenizer, True).to_str())(encoded)[
        0
    ].tolist()
    assert open_engine("gigatoken", tokenizer, True)(encoded)[0].tolist() == slow != raw


def test_of_a_long_document_the_beginning_is_sampled(wrong, monkeypatch):
    monkeypatch.setattr(engines, "LONGEST_SAMPLED", 10)
    encode = open_engine("gigatoken", train_bpe(TEXTS * 3, 300), True)
    encode([b"a" * 20 + b"x:"])
    with pytest.raises(EngineDiffers, match="x:"):
        open_engine("gigatoken", train_bpe(TEXTS * 3, 300), True)([b"x:" + b"a" * 20])


def test_the_build_uses_the_engine_that_was_compared_once(tmp_path, monkeypatch):
    tokenizer, opened, right = train_bpe(TEXTS * 3, 300), [], engines.gigatoken_of
    monkeypatch.setattr(
        engines,
        "gigatoken_of",
        lambda description: opened.append(1) or right(description),
    )
    assert choose_engine(tokenizer, True, tmp_path).name == "gigatoken"
    for times in (1, 2):  # later ones, after so much text, are new
        open_engine("gigatoken", tokenizer, True)(ENCODED)
        assert len(opened) == times
    assert (
        choose_engine(tokenizer, True, tmp_path).name == "gigatoken"
        and len(opened) == 2
    )


def test_a_tokenizer_unsupported_by_an_engine_is_refused_with_the_reason():
    description = json.loads(train_bpe(TEXTS * 3, 300).to_str())
    description["model"] = {
        "type": "WordLevel",
        "vocab": {"a": 0, "b": 1},
        "unk_token": "a",
    }
    description["added_tokens"] = []
    assert compare(Tokenizer.from_str(json.dumps(description)), True, [b"a b"])


def test_an_engine_that_cannot_be_imported_is_used_once_it_can(tmp_path, monkeypatch):
    """Neither its refusal nor an earlier good check outlasts the installation."""
    tokenizer = train_bpe(TEXTS * 3, 300)
    monkeypatch.setattr(engines, "version", lambda name: "1.0")
    monkeypatch.setattr(
        engines,
        "gigatoken_of",
        lambda description: engines.reference(Tokenizer.from_str(description)),
    )
    used = []
    for module in (None, ModuleType("gigatoken"), None):
        monkeypatch.setitem(sys.modules, "awkward", module)
        monkeypatch.setitem(sys.modules, "gigatoken", module)
        used.append(choose_engine(tokenizer, True, tmp_path).name)
    assert used == ["tokenizers", "gigatoken", "tokenizers"]


def test_an_engine_that_is_not_installed_is_not_used_and_one_line_says_so(
    tmp_path, monkeypatch, caplog
):
    installed = engines.version

    def missing(name):
        if name == engines.FAST:
            raise engines.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(engines, "version", missing)
    with caplog.at_level(logging.INFO):
        chosen = choose_engine(train_bpe(TEXTS * 3, 300), True, tmp_path)
    assert chosen == engines.reference_engine() and chosen.refused == {}
    assert [record.message for record in caplog.records] == [
        "gigatoken is not installed: tokenizers encodes the text, which takes longer"
    ]


def test_a_pattern_that_backtracks_without_end_is_refused(data, tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = write_files(tmp_path, ["a text"] * 20 + ["a" * 40 + "b"])
    settings = data(files=[files], tokenizer={"path": str(tmp_path), "eos": "</s>"})
    with pytest.raises(DataError, match="retry-limit"):
        preprocess(settings, tmp_path / "home")
