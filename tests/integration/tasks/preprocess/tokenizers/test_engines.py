"""Fast engines: the same ids as `tokenizers`, or they are not used."""

import subprocess
import sys

import pytest

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
tokenizer = train_bpe(["a line of words"] * 50, 300, 2)
threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    engines.choose_engine("gigatoken", tokenizer, lambda: ["a line of words " * 100] * 20_000, Path(sys.argv[1]))
except Stopped:
    print("stopped", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.6])
def test_a_request_to_stop_during_the_check_is_not_taken_for_the_engines_fault(tmp_path, seconds):
    pytest.importorskip("gigatoken")
    command = [sys.executable, "-c", STOPPED_WHILE_CHECKING, str(tmp_path), str(seconds)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert child.stdout == "stopped\n" and not list(tmp_path.iterdir()), child.stderr
