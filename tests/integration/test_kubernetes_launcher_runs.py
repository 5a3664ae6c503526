"""environment.launcher=kubernetes: real training through a server that answers as the API does and starts each pod as a process."""

import json
import os
import signal

import pytest

from support.kubernetes_server import Cluster
from support.laboratory import kill
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = "train.max_steps=100"


@pytest.fixture(scope="module")
def calm(lab):
    return lab.finish("calm-pods", STEPS)


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, runs=True)
    yield made
    made.close()


@pytest.fixture
def start(cluster, lab):
    def run(name: str, *overrides: str):
        section = "environment.kubernetes"
        settings = ["environment.launcher=kubernetes", f"{section}.image=infini-llama", f"{section}.claim=state"]
        settings += [f"{section}.mount_path={lab.home}"]
        return lab.start(name, STEPS, *settings, *overrides, env={"KUBECONFIG": str(cluster.kubeconfig())})

    return run


def test_a_run_trains_in_pods_and_a_killed_command_is_followed_by_one_that_watches(lab, calm, cluster, start):
    first = start("watched")
    lab.wait_for_step("watched", 15, first)
    kill(first.process.pid)
    first.wait()
    step = lab.step("watched")
    wait_until(lambda: lab.step("watched") > step + 5, 60)  # it goes on, unwatched
    second = start("watched")
    assert second.wait() == 0, second.log.read_text()
    assert "continued without the command" in second.log.read_text()
    assert lab.same("watched", "calm-pods")["attempts"] == 1
    assert len(cluster.pods) == 1 and sum(method == "POST" for method, *_ in cluster.requests) == 1


def test_a_stop_request_deletes_the_job_after_a_committed_checkpoint(lab, calm, cluster, start):
    command = start("halted")
    lab.wait_for_step("halted", 15, command)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 75, command.log.read_text()
    assert not cluster.objects
    record = json.loads((lab.run_dir("halted") / "attempts.jsonl").read_text())
    assert record["kind"] == "preempted" and record["checkpoint_step"] == record["step"] > 0
    again = start("halted")
    assert again.wait() == 0, again.log.read_text()
    assert lab.same("halted", "calm-pods")["attempts"] == 2


def test_deleting_the_job_ends_the_run_and_a_killed_pod_does_not(lab, calm, cluster, start):
    command = start("pods")
    lab.wait_for_step("pods", 15, command)
    (job,) = cluster.objects
    cluster.delete(*job)
    assert command.wait() == 75, command.log.read_text()
    assert "was deleted; the newest checkpoint" in command.log.read_text()
    command = start("pods")
    lab.wait_for_step("pods", 40, command)
    (job,) = cluster.objects
    os.killpg(cluster.pods[job[2]][0].pid, signal.SIGKILL)
    assert command.wait() == 0, command.log.read_text()
    assert lab.same("pods", "calm-pods")["attempts"] == 3


def test_two_pods_join_and_end_together(lab, cluster, start):
    one_machine = lab.finish("pods-apart", STEPS, "environment.nproc_per_node=2")
    command = start("pods-together", "environment.nnodes=2", "environment.nproc_per_node=1")
    assert command.wait() == 0, command.log.read_text()
    assert [pod.returncode for pod in next(iter(cluster.pods.values()))] == [0, 0]
    summary = json.loads((lab.run_dir("pods-together") / "summary.json").read_text())
    assert summary["weights_sha256"] == one_machine["weights_sha256"]
