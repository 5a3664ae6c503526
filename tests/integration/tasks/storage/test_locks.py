"""A lock names its holder and is freed by its death; a lease is held by the machine that renews it."""

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.storage import locks
from infini_llama.tasks.storage.locks import Busy, Lease, Lock, lock_holder
from infini_llama.tasks.train.stage import train
from support.records import make_dataset

HOLDER = """
import sys, time
from pathlib import Path
from infini_llama.tasks.storage.locks import Lock
with Lock(Path(sys.argv[1])) as lock:
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def locking_process(path, seconds=60.0) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), str(seconds)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


def test_busy_names_process_and_host_and_kill_9_frees_the_lock(tmp_path):
    path = tmp_path / "locks" / "x.lock"
    other = locking_process(path)
    with (
        pytest.raises(
            Busy, match=f"process {other.pid} on {socket.gethostname()} since 20"
        ),
        Lock(path),
    ):
        pass
    other.kill()
    other.wait()
    with Lock(path, wait=5) as lock:
        record = json.loads(path.read_text())
        assert (record["pid"], record["host"]) == (os.getpid(), socket.gethostname())
        assert not os.get_inheritable(lock.fd)
    assert path.exists()


def test_a_wait_is_bounded_and_logged_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(locks, "LOG_AFTER", 0.1)
    caplog.set_level("INFO", "infini_llama.locks")
    other = locking_process(tmp_path / "lock", seconds=2.0)
    started = time.monotonic()
    with pytest.raises(Busy), Lock(tmp_path / "lock"):
        pass
    assert not caplog.records
    with pytest.raises(Busy), Lock(tmp_path / "lock", wait=0.3):
        pass
    holder = lock_holder(tmp_path / "lock")
    assert holder and f"process {other.pid} on" in holder
    assert caplog.messages == [f"waiting: {tmp_path / 'lock'} is locked by {holder}"]
    assert time.monotonic() - started < 1.5
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


def test_a_failure_frees_the_lock_and_a_refusal_leaks_no_descriptor(tmp_path):
    with pytest.raises(ZeroDivisionError), Lock(tmp_path / "lock"):
        raise ZeroDivisionError
    gc.collect()  # descriptors of earlier tests that wait for the collector would close in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Lock(tmp_path / "lock"):
        for _ in range(5):
            with pytest.raises(Busy), Lock(tmp_path / "lock"):
                pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_umask_decides_whether_others_of_a_group_may_lock(tmp_path):
    before = os.umask(0o002)
    try:
        with Lock(tmp_path / "lock"):
            assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


@pytest.mark.parametrize("change", ["moved", "removed", "replaced"])
def test_a_holder_detects_that_others_would_lock_another_file(tmp_path, change):
    folder = tmp_path / "run"
    with Lock(folder / "lock") as lock:
        lock.check()
        folder.rename(tmp_path / "moved")
        if change == "removed":
            shutil.rmtree(tmp_path / "moved")
        if change == "replaced":
            with Lock(folder / "lock"), pytest.raises(Busy, match=f"{folder}/lock"):
                lock.check()
        with pytest.raises(Busy, match=f"{folder}/lock"):
            lock.check()
        if change == "moved":
            (tmp_path / "moved").rename(folder)
            lock.check()


QUICK = {"renew": 0.1, "expired": 0.6}


@pytest.fixture
def path(tmp_path) -> Path:
    """Where a lease is written."""
    return tmp_path / "lease"


def test_another_machine_is_refused_while_the_holder_renews(path):
    with Lease(path, "one", **QUICK) as lease:
        with (
            pytest.raises(Busy, match=rf"{path.parent} .*process \d+ on "),
            Lease(path, "two", **QUICK),
        ):
            pass
        lease.check()
        assert json.loads(path.read_text())["kernel"] == "one", (
            "a refused rival leaves no trace"
        )
    with Lease(path, "two", **QUICK):
        assert json.loads(path.read_text())["kernel"] == "two"
    assert not path.exists()


def test_the_same_machine_takes_its_own_lease_at_once(path):
    """The lock has said already that its holder is dead."""
    path.write_text(
        json.dumps({"kernel": "one", "host": "here", "pid": 1, "renewed": 3})
    )
    before = time.monotonic()
    with Lease(path, "one", renew=60, expired=60):
        assert time.monotonic() - before < 30


@pytest.mark.parametrize(
    "content",
    ['{"kernel": "one", "host": "there", "pid": 1, "renewed": 3}', "{", "", "[]", "{}"],
)
def test_the_lease_of_a_dead_process_expires(path, caplog, content):
    caplog.set_level("INFO", "infini_llama.locks")
    path.write_text(content)
    with Lease(path, "two", **QUICK):
        assert json.loads(path.read_text())["kernel"] == "two"
    assert ("process 1 on there may still use" in caplog.text) == ("there" in content)


def test_a_process_paused_too_long_detects_that_it_lost_the_lease(path):
    with Lease(path, "one", **QUICK) as lease:
        path.write_text(
            json.dumps({"kernel": "two", "host": "there", "pid": 7, "renewed": 0})
        )
        lease.thread.join(5)
        with pytest.raises(Busy, match="process 7 on there"):
            lease.check()
    assert json.loads(path.read_text())["kernel"] == "two", "the new holder keeps it"


def test_of_several_processes_that_find_an_expired_lease_one_gets_it(path):
    outcomes, refused = [], threading.Semaphore(0)
    path.write_text('{"kernel": "dead", "host": "there", "pid": 1, "renewed": 3}')

    def take(kernel):
        try:
            with Lease(path, kernel, renew=0.1, expired=0.6):
                outcomes.append(kernel)
                for _ in range(3):
                    assert refused.acquire(timeout=60)
        except Busy:
            outcomes.append("refused")
            refused.release()

    threads = [
        threading.Thread(target=take, args=(str(number),)) for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == 3 and len(outcomes) == 4


def test_a_run_that_another_machine_trains_is_refused(tmp_path):
    given = {
        "data": {"source": "python-stdlib"},
        "runtime": {"home": str(tmp_path), "name": "ours"},
    }
    run = tmp_path / "runs/ours"
    run.mkdir(parents=True)
    with (
        Lease(run / "lease", "another", renew=0.3),
        pytest.raises(Busy, match="runs/ours "),
    ):
        train(PipelineConfig.model_validate(given), make_dataset(), {}, "mine")
