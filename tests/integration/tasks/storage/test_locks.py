"""A lock across processes: the owner is named when it is busy, freed by its death, inherited by children."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from infini_llama.configs.errors import PipelineError
from infini_llama.tasks.storage.locks import Busy, Lock

HOLDER = """
import sys, time
from pathlib import Path
from infini_llama.tasks.storage.locks import Lock
with Lock(Path(sys.argv[1])) as lock:
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def locking_process(path, seconds=60.0) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path), str(seconds)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


def test_busy_names_process_and_host_and_kill_9_frees_the_lock(tmp_path):
    path = tmp_path / "locks" / "x.lock"
    other = locking_process(path)
    with (
        pytest.raises(Busy, match=f"process {other.pid} on {socket.gethostname()} since 20") as caught,
        Lock(path),
    ):
        pass
    assert isinstance(caught.value, PipelineError)
    other.kill()
    other.wait()
    with Lock(path, wait=5) as lock:
        record = json.loads(path.read_text())
        assert (record["pid"], record["host"]) == (os.getpid(), socket.gethostname())
        assert not os.get_inheritable(lock.fd)
    assert path.exists()


def test_a_joining_node_waits_for_the_configured_time(tmp_path):
    other = locking_process(tmp_path / "lock", seconds=0.8)
    started = time.monotonic()
    with pytest.raises(Busy), Lock(tmp_path / "lock", wait=0.2):
        pass
    assert time.monotonic() - started < 0.7
    with Lock(tmp_path / "lock", wait=30):
        assert time.monotonic() - started >= 0.4
    assert other.wait() == 0


@pytest.mark.parametrize("way", ["by its number", "as stdin"])
def test_a_child_with_the_descriptor_keeps_the_lock_after_its_parent(tmp_path, way):
    with Lock(tmp_path / "lock") as lock:
        if way == "as stdin":
            child = subprocess.Popen(["sleep", "60"], stdin=lock.fd)
        else:
            child = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fd])
    with pytest.raises(Busy), Lock(tmp_path / "lock"):
        pass
    child.kill()
    child.wait()
    with Lock(tmp_path / "lock"):
        pass
