"""BPE learned by gigatoken: the same tokenizer.json as by `tokenizers`, which learns wherever the two could differ."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from string import ascii_lowercase

import pytest

from infini_llama.configs.schema import TokenizerConfig
from infini_llama.tasks.preprocess import fast_learning, merges, stage
from infini_llama.tasks.preprocess.fast_learning import learn
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.tokenizers.tokenizer import train
from support.waiting import wait_until

pytest.importorskip("gigatoken")
STDLIB = sorted(Path(json.__file__).parent.parent.glob("[a-d]*.py"))


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    """gigatoken learns from little text, too."""
    monkeypatch.setattr(fast_learning, "WORTH_A_FAST_ENGINE", 1)


@pytest.fixture
def by_gigatoken(monkeypatch):
    """`tokenizers` is not to learn."""

    def refused(*_):
        raise AssertionError("tokenizers was to learn")

    monkeypatch.setattr(fast_learning, "train", refused)


def words(letters: str, longest: int, count: int) -> str:
    choose = random.Random(len(letters))
    return " ".join(
        "".join(choose.choices(letters, k=choose.randint(1, longest)))
        for _ in range(count)
    )


SPELLED = "a <|endoftext|> and <tool> in the text, "
# Name: documents, vocab_size and special tokens.
# Fmt: skip.
CORPORA: dict[str, tuple[list[str], int, list[str]]] = {
    "one small document": (["the cat sat on the mat, the cat sat"], 260, []),
    "many equal documents": (["again and again "] * 500, 262, []),
    "some empty documents": (["", "word by word by word", ""] * 9, 261, []),
    "other scripts": (
        ["größer 日本語漢字 한국어 ไทย हिन्दी العربية "] * 300 + ["Привет, мир? "] * 300,
        300,
        [],
    ),
    "emoji and controls": (
        ["\x00\x01\x7f\u0085\u2028\ufeff\ufffd\U0010ffff½²٣Ⅷ🙂👩\u200d👩🫨 "] * 300,
        280,
        [],
    ),
    "code": ([file.read_text(encoding="utf-8") for file in STDLIB], 4096, []),
    "two letters": ([words("ab", 9, 20_000)], 800, []),
    "three letters, long words": ([words("abc", 14, 40_000)], 2500, []),
    "ties": (
        [
            " ".join(
                left + right for left in ascii_lowercase for right in ascii_lowercase
            )
        ]
        * 3,
        700,
        [],
    ),
    "long lines": (
        ["word " * 60_000, "x" * 20_000 + "\n" + "other words " * 9],
        270,
        [],
    ),
    "special tokens spelled": ([SPELLED * 100], 268, ["<tool>", "<|user|>"]),
    "no merge": (["the cat"] * 3, 257, []),
}


@pytest.mark.parametrize("name", CORPORA)
def test_the_tokenizer_is_the_same(name, tmp_path, by_gigatoken, capfd):
    texts, size, special = CORPORA[name]
    settings = TokenizerConfig(vocab_size=size, special_tokens=special)
    learned = learn([text.encode() for text in texts], settings, tmp_path / "new", 1)
    assert learned.to_str() == train(texts, settings).to_str()
    assert learned.get_vocab_size() == size
    assert not list((tmp_path / "new").iterdir()) and capfd.readouterr() == ("", "")


def reason_to_learn_otherwise(texts, settings, folder, caplog, size=1) -> str:
    """Why `tokenizers` learned, which gives the tokenizer that it gives by itself."""
    with caplog.at_level(logging.INFO):
        learned = learn([text.encode() for text in texts], settings, folder, size)
    assert learned.to_str() == train(texts, settings).to_str()
    assert not folder.exists() or not list(folder.iterdir())
    [message] = [record.getMessage() for record in caplog.records]
    return message.removeprefix("tokenizers learns the tokenizer, which takes longer: ")


def test_too_little_text_for_the_vocabulary(tmp_path, caplog):
    """gigatoken goes on where no pair occurs twice, `tokenizers` does not."""
    settings = TokenizerConfig(vocab_size=400)
    reason = reason_to_learn_otherwise(
        ["the cat sat on the mat"], settings, tmp_path, caplog
    )
    assert "the last token occurs 0 time(s)" in reason


@pytest.mark.parametrize("place", [0, 3000, 5999])
def test_a_character_that_gigatoken_takes_for_another_class(
    place, tmp_path, caplog, monkeypatch
):
    """Wherever it is, every document is learned from."""
    texts = [f"document {number} of some words, and others" for number in range(6000)]
    texts[place] += '"\U00016ed1",'
    reason = reason_to_learn_otherwise(
        texts, TokenizerConfig(vocab_size=300), tmp_path, caplog
    )
    assert "a character" in reason


@pytest.mark.parametrize("special", ["the", "a", "Ġthe"])
def test_a_special_token_that_is_learned_as_well(special, tmp_path, caplog):
    settings = TokenizerConfig(vocab_size=268, special_tokens=[special])
    texts = ["the word the word the other word " * 50]
    assert "special" in reason_to_learn_otherwise(texts, settings, tmp_path, caplog)


def test_a_token_that_is_learned_twice(tmp_path, caplog):
    """gigatoken does that after the last pair that occurs twice."""
    settings = TokenizerConfig(vocab_size=268)
    texts = ["a " * 8 + "aaaaaaa " * 7 + "aaaaaa " * 9 + "a " * 6]
    assert "learned twice" in reason_to_learn_otherwise(
        texts, settings, tmp_path, caplog
    )


@pytest.mark.parametrize("kind", ["wordpiece"])
def test_another_kind(kind, tmp_path, caplog):
    settings = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 300})
    reason = reason_to_learn_otherwise(
        ["a word of text"] * 50, settings, tmp_path, caplog
    )
    assert reason == f"data.tokenizer.kind={kind}"


@pytest.mark.parametrize(("size", "free"), [(10**15, 10**12), (1, 2**30)])
def test_too_little_space_for_the_file(size, free, tmp_path, caplog, monkeypatch):
    """Before it is written, or while it is, as with compressed text."""
    spaces = iter([2**40] * (size == 1))
    usage = fast_learning.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        fast_learning.shutil,
        "disk_usage",
        lambda _: usage._replace(free=next(spaces, free - 1)),
    )
    texts = [f"document {number}: " + "words of text " * 9 for number in range(30_000)]
    settings = TokenizerConfig(vocab_size=300)
    assert "free" in reason_to_learn_otherwise(texts, settings, tmp_path, caplog, size)


def test_a_process_that_fails(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(merges, "__name__", "infini_llama.no_such_module")
    settings = TokenizerConfig(vocab_size=300)
    reason = reason_to_learn_otherwise(
        ["a word of text"] * 50, settings, tmp_path, caplog
    )
    assert (
        reason.startswith("gigatoken ended with status 1 (")
        and "no_such_module" in reason
    )


@pytest.mark.parametrize("case", ["small", "small, of unknown size", "not installed"])
def test_nothing_is_logged_where_gigatoken_is_not_expected(
    case, tmp_path, caplog, monkeypatch
):
    if "small" in case:
        monkeypatch.setattr(fast_learning, "WORTH_A_FAST_ENGINE", 10**6)
    else:
        monkeypatch.setattr(fast_learning, "FAST", "no-such-package")
    monkeypatch.setattr(fast_learning, "_merges", None)
    with caplog.at_level(logging.INFO):
        size = 0 if "unknown" in case else 10
        learned = learn(
            [b"a word"] * 9, TokenizerConfig(vocab_size=260), tmp_path / "new", size
        )
    assert (
        learned.to_str()
        == train(["a word"] * 9, TokenizerConfig(vocab_size=260)).to_str()
    )
    assert not caplog.records and not list(tmp_path.glob("new/*"))


LEARNING = """
import os, signal, sys
from pathlib import Path
from infini_llama.configs.schema import TokenizerConfig
from infini_llama.tasks.preprocess import fast_learning, merges
from infini_llama.tasks.preprocess.fast_learning import learn

class Stopped(BaseException):
    pass

def stop(*_):
    raise Stopped

signal.signal(signal.SIGTERM, stop)
fast_learning.WORTH_A_FAST_ENGINE, merges.__name__ = 1, "slow_merges"
try:
    learn([b"a line of words"] * 9, TokenizerConfig(vocab_size=300), Path(sys.argv[1]), 0)
except Stopped:
    print("stopped")
"""
# In place of gigatoken: it holds Python's lock, as that does, and hears no signal that Python handles.
SLOW = """
import ctypes, os, signal, sys
from pathlib import Path
from infini_llama.tasks.runs.exec_wrapper import die_with_parent

die_with_parent(signal.SIGKILL, int(sys.argv[1]))
Path("started.tmp").write_text(str(os.getpid()))
os.rename("started.tmp", "started")
ctypes.PyDLL(None).sleep(600)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="the death of a parent is heard on Linux alone"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_request_to_stop_ends_the_learning_process_and_leaves_no_file(
    number, tmp_path
):
    (tmp_path / "slow_merges.py").write_text(SLOW)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", LEARNING, str(tmp_path / "folder")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
    )
    started = tmp_path / "started"
    wait_until(lambda: started.exists() or parent.poll() is not None)
    child = int(started.read_text())
    parent.send_signal(number)
    printed, _ = parent.communicate(timeout=10)
    assert printed == ("stopped\n" if number == signal.SIGTERM else "")
    wait_until(lambda: not is_running(child), seconds=10)
    assert not list((tmp_path / "folder").iterdir())


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_dataset_and_its_key_are_the_same_whoever_learns(
    data, tmp_path, digests, small_parts, monkeypatch, caplog
):
    """Held-out text and its copies are left out, whoever learns."""
    monkeypatch.setattr(stage, "WORTH_A_FAST_ENGINE", 1)
    settings = data(tokenizer={"vocab_size": 300})
    calls = []
    right = fast_learning._merges
    monkeypatch.setattr(
        fast_learning, "_merges", lambda *given: calls.append(given) or right(*given)
    )
    first = preprocess(settings, tmp_path / "gigatoken")
    monkeypatch.setattr(fast_learning, "WORTH_A_FAST_ENGINE", 10**9)
    second = preprocess(settings, tmp_path / "tokenizers")
    assert first == second and len(calls) == 1
    assert digests(tmp_path / "gigatoken" / "datasets") == digests(
        tmp_path / "tokenizers" / "datasets"
    )
    names = [
        [file.name for file in (tmp_path / home / "units" / "tokenizers").iterdir()]
        for home in ("gigatoken", "tokenizers")
    ]
    assert names[0] == names[1] and len(names[0]) == 1
