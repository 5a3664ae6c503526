"""Fast engines: the same ids as `tokenizers`, or they are not used."""

import subprocess
import sys

import pytest

from infini_llama.tasks.preprocess import stage
from support.stages import preprocess, read_manifest

STOPPED_WHILE_CHECKING = """
import os, signal, sys, threading, time
from pathlib import Path
from infini_llama.tasks.preprocess.tokenizers import engines
from infini_llama.tasks.preprocess.tokenizers.tokenizer import train_bpe

class Stopped(BaseException):
    pass

def stop(*_):
    raise Stopped

signal.signal(signal.SIGTERM, stop)
tokenizer = train_bpe(["a line of words"] * 50, 300)
threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    engines.golden = lambda tokenizer: [b"a line of words " * 100] * 20_000
    engines.choose_engine(tokenizer, Path(sys.argv[1]))
except Stopped:
    print("stopped", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_the_bytes_are_the_same_with_every_engine(data, tmp_path, digests, workers, small_parts, monkeypatch):
    pytest.importorskip("gigatoken")
    first = preprocess(data(), str(tmp_path / "slow"))
    monkeypatch.setattr(stage, "WORTH_A_FAST_ENGINE", 1)
    second = preprocess(data(num_workers=workers), str(tmp_path / "fast"))
    assert first == second
    assert digests(tmp_path / "slow" / "datasets") == digests(tmp_path / "fast" / "datasets")
    used = read_manifest(tmp_path / "fast" / second["path"], "dataset")["meta"]["engine"]
    assert used["name"] == "gigatoken" and used["refused"] == {}


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.6])
def test_a_request_to_stop_during_the_check_is_not_taken_for_the_engines_fault(tmp_path, seconds):
    pytest.importorskip("gigatoken")
    command = [sys.executable, "-c", STOPPED_WHILE_CHECKING, str(tmp_path), str(seconds)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert child.stdout == "stopped\n" and not list(tmp_path.iterdir()), child.stderr
