"""Unit tests start no process: those that need one stand in tests/integration, under the same name."""

import multiprocessing.util
import os
import subprocess
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_process(request, monkeypatch):
    popen = subprocess.Popen.__init__

    def refuse(*arguments: object, **_: object) -> None:
        pytest.fail(f"a unit test starts a process: {arguments[:2]}; move it to tests/integration", pytrace=False)

    def start(self: subprocess.Popen, command: list[str], *arguments: Any, **options: Any) -> None:
        if command[0] != "uname":  # which the standard library's `platform` asks once
            refuse(command)
        popen(self, command, *arguments, **options)

    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr(subprocess.Popen, "__init__", start)
        monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", refuse)
        monkeypatch.setattr(os, "fork", refuse)
