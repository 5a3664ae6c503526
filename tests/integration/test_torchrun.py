"""What torchrun leaves behind."""

import os
import subprocess
from pathlib import Path

from infini_llama.tasks.train import launch as local
from support.records import make_plan

PLAN = make_plan()


def test_torchrun_leaves_nothing_in_the_folder_of_temporary_files(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = local.torchrun(tmp_path, PLAN, None, is_host=True)
    ended = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(temporary)}, capture_output=True, text=True, timeout=200, check=False
    )
    assert (tmp_path / "status-0.json").exists(), f"the worker was not started: {ended.stderr}"
    assert [path.name for path in Path(temporary).iterdir()] == []
