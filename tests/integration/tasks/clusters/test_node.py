"""A machine's part in a run, around the training itself: whom it follows, what it is told, and when it ends."""

import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.tasks.clusters import node
from infini_llama.tasks.clusters.leader import Leader, newest_attempt
from infini_llama.tasks.clusters.node_records import is_over
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.job_file import write_job
from infini_llama.tasks.runs.run_folder import RunFolder, append_attempt
from infini_llama.tasks.runs.status import status_path, write_status
from infini_llama.tasks.storage.lease import Lease
from support.records import make_job, make_plan


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "mine")
    folder.path.mkdir()
    return folder


def test_a_leader_is_alive_while_its_lease_changes_whatever_the_clocks(tmp_path):
    path = tmp_path / "lease"
    with Leader(path, expired=1.0, every=0.01) as leader:
        wait_until(lambda: leader.was_seen)
        assert not leader.lives
        with Lease(path, renew=0.05):
            os.utime(path, (0, 0))
            wait_until(lambda: leader.lives)
            time.sleep(1.5)
            assert leader.lives
            text = path.read_text()
        wait_until(lambda: not leader.lives)  # given back
        path.write_text(text)
        wait_until(lambda: leader.lives)
        wait_until(lambda: not leader.lives)  # not renewed any more


def test_a_leader_is_not_dead_because_this_process_was_stopped(tmp_path):
    """Ctrl-Z, or a suspended job: it looks before its thread has read the lease again."""
    now = 1000.0
    path = tmp_path / "lease"
    path.write_text("renewed once")
    with Leader(path, expired=30.0, every=0.01, clock=lambda: now) as leader:
        wait_until(lambda: leader.lives)
        now += 3600.0
        assert leader.lives
        path.write_text("renewed twice")
        wait_until(lambda: leader.found == "renewed twice")
        for _ in range(29):
            assert leader.lives
            now += 1.0
        assert leader.lives
        now += 1.0
        assert not leader.lives


def test_an_attempt_that_has_ended_is_not_followed(run):
    assert newest_attempt(run) is None
    for number in (1, 2):
        folder = run.path / "logs" / f"attempt-{number:02d}"
        folder.mkdir(parents=True)
        (folder / "job.json").write_text("{}")
    assert newest_attempt(run).name == "attempt-02"
    append_attempt(run, AttemptRecord(attempt=2, kind="failed", code=70))
    assert newest_attempt(run) is None
    for number in (99, 100):
        folder = run.path / "logs" / f"attempt-{number:02d}"
        folder.mkdir()
        (folder / "job.json").write_text("{}")
    assert newest_attempt(run).name == "attempt-100"


def test_after_nodes_that_did_not_come_together_a_node_takes_part_in_the_next_attempt(run, monkeypatch, caplog):
    """And another fault than one that a next attempt may be without ends its part."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(node, "_train", lambda *given: 70)  # torchrun, when no other node has come

    def begin(number: int, nnodes: int = 2) -> Path:
        folder = run.path / "logs" / f"attempt-{number:02d}"
        folder.mkdir(parents=True)
        write_job(folder, make_job(run.path, plan=make_plan(nnodes=nnodes, master_addr="127.0.0.1")))
        return folder

    with ThreadPoolExecutor(1) as pool, Lease(run.path / "lease", renew=0.05):
        attempts = [begin(1)]
        following = pool.submit(node.follow, run, node.NodeSettings(nnodes=2, node_rank=0), 5.0)
        wait_until(lambda: is_over(attempts[0]) or following.done())
        attempts.append(begin(2))
        wait_until(lambda: is_over(attempts[1]) or following.done())
        assert not following.done()
        begin(3, nnodes=3)
        with pytest.raises(ConfigError, match="NNODES=2"):
            following.result(20)
    assert caplog.text.count("ended with 70 here") == 2


def test_the_workers_get_the_grace_period_that_was_measured(tmp_path, monkeypatch):
    """It reaches torchrun, which ends them, as a variable."""
    say = "import os, sys; open(sys.argv[1], 'w').write(os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'])"
    command = [sys.executable, "-c", say, str(tmp_path / "said")]
    monkeypatch.setattr(node.local, "torchrun", lambda attempt_dir, plan, where: command)
    attempt_dir = tmp_path / "runs" / "mine" / "logs" / "attempt-01"
    attempt_dir.mkdir(parents=True)
    node._train(attempt_dir, 0, make_job(tmp_path, grace_period=39.0), [], lambda: None)
    assert (tmp_path / "said").read_text() == "39"


def test_where_ranks_were_killed_no_other_process_is_sent_a_signal(tmp_path):
    """Of two that never said they ended, one's number is nobody's, the other's another process's by now."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        for rank, pid in enumerate((ended.pid, other.pid)):
            write_status(tmp_path, rank, "running", 70)
            path = status_path(tmp_path, rank)
            path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": pid}))
        ranks = node.local.Torchrun(ended, tmp_path, 2)
        assert ranks.running() == []
        node._end_with_the_others(ranks)
        ranks.stop(1.0)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.3)
    finally:
        other.kill()
        other.wait()


@pytest.fixture
def follower(run, monkeypatch):
    """Starts `node.follow` beside the test; it and its eye on the leader look often."""
    monkeypatch.setattr(node, "Leader", partial(Leader, expired=1.0, every=0.01))
    monkeypatch.setattr(node, "POLL_SECONDS", 0.01)
    with ThreadPoolExecutor(1) as pool:
        yield lambda timeout: pool.submit(node.follow, run, node.NodeSettings(), timeout)


def end(run: RunFolder, number: int, code: int) -> None:
    append_attempt(run, AttemptRecord(attempt=number, kind="failed" if code else "done", code=code))


@pytest.mark.parametrize("code", [0, 64, 65, 75])
def test_ends_after_which_nobody_comes_back_by_himself_end_the_node_too(run, follower, code):
    with Lease(run.path / "lease", renew=0.05):
        following = follower(timeout=60.0)
        end(run, 1, code)
        time.sleep(1.0)
        assert not following.done(), "the leader still has it"
    assert following.result(20) == code


@pytest.mark.parametrize("code", [70, 71])
def test_after_other_endings_a_node_waits_for_the_leader(run, follower, code):
    with Lease(run.path / "lease", renew=0.05):
        following = follower(timeout=0.3)
        end(run, 1, code)
        time.sleep(1.0)
    with pytest.raises(PipelineError, match=r"no command has led the run .* for 0 s"):
        following.result(20)


@pytest.mark.parametrize("code", [64, 75])
def test_a_node_that_is_early_waits_for_the_leader_of_a_resumed_run(run, follower, code):
    end(run, 1, code)
    following = follower(timeout=10.0)
    time.sleep(0.5)
    with Lease(run.path / "lease", renew=0.05):
        time.sleep(1.0)
        end(run, 2, 65)
    assert following.result(20) == 65, "not how it ended before"


def test_without_a_new_leader_the_last_ending_is_that_of_the_run(run, follower):
    end(run, 1, 75)
    assert follower(timeout=0.3).result(20) == 75


def test_a_run_that_is_done_is_not_waited_for(run, follower):
    end(run, 1, 0)
    assert follower(timeout=600.0).result(20) == 0


def test_the_ending_of_an_earlier_attempt_is_not_used_for_a_killed_leader(run, follower):
    for number in (1, 2):
        (run.path / "logs" / f"attempt-{number:02d}").mkdir(parents=True)
    end(run, 1, 75)
    with Lease(run.path / "lease", renew=0.05):
        following = follower(timeout=0.3)
        time.sleep(1.0)
    with pytest.raises(PipelineError, match=r"no command has led the run"):
        following.result(20)


def test_the_position_of_a_node_comes_from_options_then_variables_then_the_plan(monkeypatch, tmp_path):
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}.items():
        monkeypatch.setenv(name, value)
    plan = make_plan(nnodes=2)
    where, requested = node.parse([str(tmp_path), "--master-addr=b"])
    assert where == tmp_path and requested == node.NodeSettings(2, 1, "b", 7)
    over = requested.over(plan)
    assert (over.nnodes, over.master_addr, over.port) == (2, "b", 7)
    assert node.NodeSettings().over(plan) == plan
    with pytest.raises(ConfigError, match=r"NNODES=2, .* environment.nnodes=4"):
        requested.over(make_plan(nnodes=4))
    monkeypatch.setenv("NODE_RANK", "first")
    with pytest.raises(ConfigError, match="NODE_RANK=first is not an integer"):
        node.parse([str(tmp_path)])


@pytest.mark.parametrize("variable", ["SLURM_NODEID", "JOB_COMPLETION_INDEX", "NODE_RANK"])
def test_a_node_of_a_job_knows_its_number(run, monkeypatch, variable):
    attempt_dir = run.path / "logs" / "attempt-01"
    attempt_dir.mkdir(parents=True)
    taken = []
    monkeypatch.setattr(node, "take_part", lambda where, requested, leader: taken.append(requested.node_rank) or 0)
    monkeypatch.setenv(variable, "3")
    assert node.serve(*node.parse([str(attempt_dir)])) == 0 and taken == [3]


def test_a_node_has_its_own_interface_and_no_masked_secrets(caplog):
    env = {"OMP_NUM_THREADS": "2", "WANDB_API_KEY": "***"}
    assert node.environment(make_plan(env=env, nnodes=4, master_addr="127.0.0.1"), 3) == {
        "OMP_NUM_THREADS": "2",
        "INFINI_LLAMA_NODE": "3",
    }
    assert "environment.env.WANDB_API_KEY" in caplog.text
    addresses = {"cable": "10.0.0.9"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infini_llama.tasks.clusters.address.addresses", lambda: addresses)
        patch.setattr("infini_llama.tasks.clusters.address.own_address_towards", lambda host: "10.0.0.9")
        assert (
            node.environment(make_plan(env=env, nnodes=4, master_addr="127.0.0.1"), 3)["GLOO_SOCKET_IFNAME"] == "cable"
        )
        env["GLOO_SOCKET_IFNAME"] = "mine"
        assert (
            node.environment(make_plan(env=env, nnodes=4, master_addr="127.0.0.1"), 3)["GLOO_SOCKET_IFNAME"] == "mine"
        )
