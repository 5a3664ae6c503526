"""Texts of any length in constant memory, in a process of its own."""

import json
import subprocess
import sys

import pytest

from support.benchmarks import FOLDER


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tokens", [100_000, 1_000_000])
def test_memory_does_not_grow_with_the_text(tmp_path, tokens):
    command = [
        sys.executable,
        FOLDER / "streaming.py",
        "--tokens",
        str(tokens),
        "--output",
        tmp_path / "found.json",
    ]
    subprocess.run(command, check=True, capture_output=True)
    reports = json.loads((tmp_path / "found.json").read_text())["reports"]
    assert len({report["state"] for report in reports}) == 1
    # At 10,000 tokens whole pieces have been read.
    after_a_piece = reports[1]["resident"]
    assert reports[-1]["resident"] < after_a_piece + 32e6
