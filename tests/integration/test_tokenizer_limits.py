"""A tokenizer.json that lets text grow without end: refused by its memory, and stopped by SIGTERM meanwhile."""

import json
import os
import signal
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models, normalizers

# The limit itself is tests/unit's; here it is moved, so that a test needs 0.3 GB and not 2.
PROGRAM = """
import sys
from infini_llama.flows.cli.main import main
from infini_llama.tasks.preprocess.tokenizers import limits
most_resident, seen = limits._most_resident, []
def noted():
    seen.append(most_resident())
    if seen[-1] - seen[0] > 2**28:
        print("growing", flush=True)
    return seen[-1]
limits._most_resident, limits.MEMORY, limits.MEMORY_PER_BYTE, limits.GRACE = noted, int(sys.argv[1]), 0, 0.2
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def command(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Replace("", "x" * 1_000_000)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 200)
    config = {
        "data": {"source": "files", "files": [f"{tmp_path}/*.txt"], "sequence_length": 64, "validation_fraction": 0.3}
        | {"tokenizer": {"path": str(tmp_path), "eos": "</s>"}},
        "runtime": {"home": str(tmp_path / "home")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    return lambda memory: [sys.executable, "-c", PROGRAM, str(memory), "preprocess", str(tmp_path / "run.yaml")]


def started(command):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_text_that_grows_without_end_is_refused(command):
    process = started(command(2**28))
    assert process.stderr
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 65 and "memory" in errors, errors
    assert usage.ru_maxrss < 2 * 2**20, "GiB in KiB"


def test_sigterm_ends_a_running_tokenizer(command):
    process = started(command(2**40))
    assert process.stdout and process.stdout.readline() == "growing\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, errors
