"""Texts of any length in constant memory, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "streaming.py"


def streamed(tokens: int, tmp_path: Path) -> list[dict]:
    output = tmp_path / "streaming.json"
    subprocess.run(
        [sys.executable, SCRIPT, "--tokens", str(tokens), "--output", output], check=True, capture_output=True
    )
    return json.loads(output.read_text())["reports"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tokens", [100_000, 1_000_000])
def test_memory_does_not_grow_with_the_text(tmp_path, tokens):
    reports = streamed(tokens, tmp_path)
    assert len({report["state"] for report in reports}) == 1
    after_a_piece = reports[1]["resident"]  # at 10,000 tokens whole pieces have been read
    assert reports[-1]["resident"] < after_a_piece + 32e6
