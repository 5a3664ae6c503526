"""Real processes that are stopped, or that are no longer a rank's."""

import signal
import subprocess
import sys

import pytest

from infini_llama.tasks.runs.status import status_path, write_status
from infini_llama.tasks.storage.record_files import read_fields, write_fields
from infini_llama.tasks.train.hangs import HangDetector
from support.waiting import wait_until
from support.watched_ranks import clock as clock
from support.watched_ranks import watch as watch


@pytest.fixture
def sleeper(tmp_path):
    """A process that is rank 1's, as far as its status and its command line say."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", str(tmp_path)])
    path = status_path(tmp_path, 1)
    write_fields(path, read_fields(path) | {"pid": process.pid})
    yield process
    process.kill()
    process.wait()


def test_a_stopped_process_has_half_the_timeout(watch, clock, sleeper):
    watch.longest["compute"] = 30.0  # so that silence alone would mean nothing for long
    clock.passes(3.0, watch)
    assert watch.hung() is None
    sleeper.send_signal(signal.SIGSTOP)
    sentence = wait_until(watch.hung)  # the kernel takes a moment to stop it
    assert all(word in sentence for word in ("rank 1", "stopped", "3 s", "'compute'", "step 7"))
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: watch.hung() is None)


def test_stacks_are_requested_from_live_workers_of_this_machine_only(tmp_path, monkeypatch):
    """Rank 0 is one; 1 has ended, and its number is another process's; 2's number is one of another machine."""
    monkeypatch.setattr("infini_llama.tasks.train.hangs.STACKS_SECONDS", 0.0)
    waiting = [sys.executable, "-c", "import time; time.sleep(100)"]  # a process that SIGUSR2 ends
    processes = [subprocess.Popen([*waiting, str(folder)]) for folder in (tmp_path, "elsewhere", tmp_path)]
    try:
        for rank, process in enumerate(processes):
            write_status(tmp_path, rank, "running", 70)
            changed = {"pid": process.pid} | ({"machine": "another"} if rank == 2 else {})
            path = status_path(tmp_path, rank)
            write_fields(path, read_fields(path) | changed)
        HangDetector(tmp_path, 3, timeout=5.0).dump_stacks()
        assert processes[0].wait(20) == -signal.SIGUSR2
        assert [process.poll() for process in processes[1:]] == [None, None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
