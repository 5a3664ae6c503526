"""Unit tests start no process: those that need one stand in tests/integration, under the same name."""

import multiprocessing.util
import os
import resource
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

# By the standard library's `platform`, and by matplotlib where it has no list of fonts yet.
ASKED_ONCE = (
    "uname",
    "fc-list",
)


@pytest.fixture
def few_addresses() -> Iterator[int]:
    """Bytes that this process may map: more than anything takes, and too few for a sparse file of that size."""
    size, (before, most) = 2**40, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size, most))
    yield size
    resource.setrlimit(resource.RLIMIT_AS, (before, most))


@pytest.fixture(autouse=True)
def no_process(request, monkeypatch):
    popen = subprocess.Popen.__init__

    def refuse(*arguments: object, **_: object) -> None:
        pytest.fail(
            f"a unit test starts a process: {arguments[:2]}; move it to tests/integration",
            pytrace=False,
        )

    def start(
        self: subprocess.Popen, command: list[str], *arguments: Any, **options: Any
    ) -> None:
        if command[0] not in ASKED_ONCE:
            refuse(command)
        popen(self, command, *arguments, **options)

    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr(subprocess.Popen, "__init__", start)
        monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", refuse)
        monkeypatch.setattr(os, "fork", refuse)
