"""The command as a process of its own; tests/unit calls it in the test's process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
# A limit on the size of files stands for a full disk; Python gets EFBIG where it would get ENOSPC.
FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"


def command(folder: Path, *words: str, before: str = "") -> subprocess.CompletedProcess:
    code = f"{before}import sys\nfrom infini_llama.flows.cli.main import main\nsys.exit(main({[*words]}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        # Under a limit, Python would leave half a .pyc behind.
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def texts(tmp_path) -> Path:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"word{number} = {number}\n" * 20)
    (tmp_path / "run.yaml").write_text(
        "data: {files: ['*.txt'], sequence_length: 16, tokenizer: {vocab_size: 300}, validation_fraction: 0.2}\n"
    )
    return tmp_path


def test_no_space_on_the_device_and_the_same_command_again(texts):
    full = command(texts, "preprocess", "run.yaml", before=FULL_DISK)
    assert full.returncode == 70 and full.stdout == ""
    assert "no space" in full.stderr.splitlines()[-1] and "Traceback" not in full.stderr
    again = command(texts, "preprocess", "run.yaml")
    assert again.returncode == 0, again.stderr


def test_the_module_is_the_command(texts):
    command = [sys.executable, "-m", "infini_llama", "verify", "nowhere"]
    done = subprocess.run(command, cwd=texts, env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, timeout=120)
    assert done.returncode == 64 and not done.stdout and b"nowhere" in done.stderr
