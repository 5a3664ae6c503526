"""A machine's part in a run, around the training itself: whom it follows, what it is told, and when it ends."""

import os
import time

import pytest

from configs.errors import ConfigError, PipelineError
from tasks.lease import Lease
from tasks.train import node
from tasks.train.nodes.leader import Leader
from tasks.train.run_folder import RunFolder, append_attempt


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


def test_a_leader_lives_while_its_lease_changes_whatever_the_clocks_say(tmp_path):
    path = tmp_path / "lease"
    with Leader(path, expired=1.0, every=0.01) as leader:
        wait_until(lambda: leader.known)
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


def test_the_order_of_an_attempt_that_has_ended_is_not_followed(run):
    assert node.newest_order(run) is None
    for number in (1, 2):
        folder = run.path / "logs" / f"attempt-{number:02d}"
        folder.mkdir(parents=True)
        (folder / "order.json").write_text("{}")
    assert node.newest_order(run).parent.name == "attempt-02"
    append_attempt(run, {"attempt": 2, "kind": "failed", "code": 70})
    assert node.newest_order(run) is None


@pytest.mark.parametrize(("code", "ended"), [(0, 0), (64, 64), (65, 65), (75, 75), (70, None), (71, None)])
def test_ends_after_which_nobody_comes_back_by_himself_end_the_node_too(run, code, ended):
    append_attempt(run, {"attempt": 1, "kind": "done" if code == 0 else "failed", "code": code})
    with Leader(run.path / "lease", every=0.01) as leader:
        wait_until(lambda: leader.known)
        assert node.end_of(run, leader) == ended
    if ended is not None:
        assert node.follow(run, node.Wishes(), timeout=30.0) == ended
    else:
        with pytest.raises(PipelineError, match=r"no command has led the run .* for 0 s"):
            node.follow(run, node.Wishes(), timeout=0.3)


def test_command_line_then_variables_then_the_order_say_where_a_node_is(monkeypatch, tmp_path):
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}.items():
        monkeypatch.setenv(name, value)
    plan = {"nnodes": 2, "master_addr": "auto", "port": "auto"}
    where, wishes = node.parse([str(tmp_path), "--master-addr=b"])
    assert where == tmp_path and wishes == node.Wishes(2, 1, "b", 7)
    assert wishes.over(plan) == {"nnodes": 2, "master_addr": "b", "port": 7}
    assert node.Wishes().over(plan) == plan
    with pytest.raises(ConfigError, match=r"NNODES=2, but the run is ordered with environment.nnodes=4"):
        wishes.over(plan | {"nnodes": 4})
    monkeypatch.setenv("NODE_RANK", "first")
    with pytest.raises(ConfigError, match="NODE_RANK=first is not a whole number"):
        node.parse([str(tmp_path)])


def test_a_node_has_its_own_interface_and_no_masked_secrets(tmp_path, caplog):
    place = node.meeting.Place(tmp_path, 3, 4, "c10d", "127.0.0.1", 1)
    order = {"plan": {"env": {"OMP_NUM_THREADS": "2", "WANDB_API_KEY": "***"}}}
    assert node.environment(order, place) == {"OMP_NUM_THREADS": "2", "INFINI_LLAMA_NODE": "3"}
    assert "WANDB_API_KEY of environment.env is a secret" in caplog.text
    addresses = {"cable": "10.0.0.9"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.train.nodes.address.addresses", lambda: addresses)
        patch.setattr("tasks.train.nodes.address.own_address_towards", lambda host: "10.0.0.9")
        assert node.environment(order, place)["GLOO_SOCKET_IFNAME"] == "cable"
        order["plan"]["env"]["GLOO_SOCKET_IFNAME"] = "mine"
        assert node.environment(order, place)["GLOO_SOCKET_IFNAME"] == "mine"
