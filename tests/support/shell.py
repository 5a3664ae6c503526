"""A command line, run as a reader of the pages types it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def shell(
    line: str, folder: Path, codes: Sequence[int] = (0,), **variables: str
) -> str:
    """What `line` prints in `folder`, which is also the home of its user; an AssertionError for another exit code."""
    environment = {
        "HOME": str(folder),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
    }
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    command = ["bash", "-ec", line]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in codes, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr
