"""The command as a process of its own; tests/unit calls it in the test's process."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_the_module_is_the_command(tmp_path):
    command = [sys.executable, "-m", "infini_llama", "verify", "nowhere"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, timeout=120
    )
    assert done.returncode == 64 and not done.stdout and b"nowhere" in done.stderr
