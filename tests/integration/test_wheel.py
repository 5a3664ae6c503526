"""The wheel has every file of the packages, types included, and runs from nothing but itself."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "model", "configs")
LEFT_OUT = ("__pycache__", ".pyc")


@pytest.mark.slow
def test_a_wheel_is_whole_and_runs(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=280)
    (wheel,) = tmp_path.glob("infini_llama-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if not name.startswith("infini_llama-")}
        archive.extractall(tmp_path / "site")
    here = {
        f"infini_llama/{path.relative_to(ROOT).as_posix()}"
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file()
    } | {f"infini_llama/{path.name}" for path in (ROOT / "src/infini_llama").iterdir() if path.is_file()}
    assert inside == {name for name in here if not any(part in name for part in LEFT_OUT)}
    assert "infini_llama/py.typed" in inside
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "INFINI_LLAMA_HOME": str(tmp_path / "home")}
    words = [sys.executable, "-m", "infini_llama", "preprocess", "tiny", "data.tokenizer.vocab_size=300", "--json"]
    output = subprocess.run(
        words, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=280
    )
    assert json.loads(output.stdout)["path"].startswith("datasets/python-stdlib-")
    where = subprocess.run(
        [sys.executable, "-c", "import infini_llama.tasks as tasks; print(tasks.__path__[0])"],
        cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert where.stdout.strip() == str(tmp_path / "site" / "infini_llama" / "tasks")
