"""Two machines and one run: whoever renews the lease has it, and a holder that fell silent loses it."""

import json
import threading
import time

import pytest

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.storage.locks import Busy, Lease
from infini_llama.tasks.train.stage import train
from support.records import make_dataset

QUICK = {"renew": 0.1, "expired": 0.6}


def test_another_machine_is_refused_while_the_holder_renews(tmp_path):
    path = tmp_path / "lease"
    with Lease(path, "one", **QUICK) as lease:
        with pytest.raises(Busy, match=rf"{tmp_path} .*process \d+ on "), Lease(path, "two", **QUICK):
            pass
        lease.check()
        assert json.loads(path.read_text())["kernel"] == "one", "a refused rival leaves no trace"
    with Lease(path, "two", **QUICK):
        assert json.loads(path.read_text())["kernel"] == "two"
    assert not path.exists()


def test_the_same_machine_takes_its_own_lease_at_once(tmp_path):
    """The lock has said already that its holder is dead."""
    path = tmp_path / "lease"
    path.write_text(json.dumps({"kernel": "one", "host": "here", "pid": 1, "renewed": 3}))
    before = time.monotonic()
    with Lease(path, "one", renew=60, expired=60):
        assert time.monotonic() - before < 30


@pytest.mark.parametrize("content", ['{"kernel": "one", "host": "there", "pid": 1, "renewed": 3}', "{", "", "[]", "{}"])
def test_the_lease_of_a_dead_process_expires(tmp_path, content):
    path = tmp_path / "lease"
    path.write_text(content)
    with Lease(path, "two", **QUICK):
        assert json.loads(path.read_text())["kernel"] == "two"


def test_a_process_paused_too_long_detects_that_it_lost_the_lease(tmp_path):
    path = tmp_path / "lease"
    with Lease(path, "one", **QUICK) as lease:
        path.write_text(json.dumps({"kernel": "two", "host": "there", "pid": 7, "renewed": 0}))
        lease.thread.join(5)
        with pytest.raises(Busy, match="process 7 on there"):
            lease.check()
    assert json.loads(path.read_text())["kernel"] == "two", "the new holder keeps it"


def test_of_several_processes_that_find_an_expired_lease_one_gets_it(tmp_path):
    path, outcomes, refused = tmp_path / "lease", [], threading.Semaphore(0)
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

    threads = [threading.Thread(target=take, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == 3 and len(outcomes) == 4


def test_a_run_that_another_machine_trains_is_refused(tmp_path):
    given = {"data": {"source": "python-stdlib"}, "runtime": {"home": str(tmp_path), "name": "ours"}}
    run = tmp_path / "runs/ours"
    run.mkdir(parents=True)
    with Lease(run / "lease", "another", renew=0.3), pytest.raises(Busy, match="runs/ours "):
        train(PipelineConfig.model_validate(given), make_dataset(), {}, "mine")
