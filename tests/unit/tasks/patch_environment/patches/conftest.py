"""Patches change the process they are applied in, so each test runs code in processes of its own: one without, one with."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess]:
    """Runs `code` in a fresh interpreter, after the patch of this name where one is given."""

    def start(code: str, patch: str | None = None, **variables: str) -> subprocess.CompletedProcess:
        before = (
            f"from infini_llama.tasks.patch_environment.patches.registry import apply\napply([{patch!r}])\n"
            if patch
            else ""
        )
        unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TOKENIZERS_PARALLELISM")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        return subprocess.run(
            [sys.executable, "-c", before + code],
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    return start
