"""environment.launcher=slurm on a real Slurm of one machine: warning and requeue, scancel, a lost node, and a command that is killed."""

import json
import signal

import pytest

from support.laboratory import kill
from support.slurm_cluster import MISSING, slurm, state
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), MISSING]
__all__ = ["slurm"]  # a fixture
STEPS = "train.max_steps=150"


@pytest.fixture(scope="module")
def calm(lab):
    return lab.finish("calm-slurm", STEPS)


@pytest.fixture
def start(slurm, lab):
    def run(name: str, *overrides: str):
        return lab.start(name, STEPS, "environment.launcher=slurm", *overrides, env=slurm.environment)

    return run


def job_of(lab, name: str, attempt: int = 1) -> str:
    path = lab.run_dir(name) / "logs" / f"attempt-{attempt:02d}" / "submitted.json"
    wait_until(lambda: path.exists() and json.loads(path.read_text())["job"], 60)
    return str(json.loads(path.read_text())["job"])


def jobs_named(slurm, lab, name: str) -> list[str]:
    return [
        line
        for line in slurm("squeue", "--noheader", "--states=all", "--format=%j").split()
        if line.startswith(f"{name}-")
    ]


def test_a_killed_command_leaves_its_job_and_the_next_one_watches_it(slurm, lab, calm, start):
    first = start("left")
    lab.wait_for_step("left", 20, first)
    kill(first.process.pid)
    first.wait()
    job, step = job_of(lab, "left"), lab.step("left")
    wait_until(lambda: lab.step("left") > step + 5, 60)  # it goes on, unwatched
    second = start("left")
    assert second.wait() == 0, second.log.read_text()
    assert "continued without the command" in second.log.read_text()
    assert lab.same("left", "calm-slurm")["attempts"] == 1
    assert jobs_named(slurm, lab, "left") == [jobs_named(slurm, lab, "left")[0]]
    assert state(slurm, job) == "COMPLETED"


def test_a_command_killed_before_recording_the_job_id_finds_its_job_by_name(slurm, lab, calm, start):
    first = start("unnamed")
    lab.wait_for_step("unnamed", 20, first)
    kill(first.process.pid)
    first.wait()
    path = lab.run_dir("unnamed") / "logs" / "attempt-01" / "submitted.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"job": None}))
    second = start("unnamed")
    assert second.wait() == 0, second.log.read_text()
    assert lab.same("unnamed", "calm-slurm")["attempts"] == 1
    assert len(jobs_named(slurm, lab, "unnamed")) == 1


def test_a_job_that_ended_while_unwatched_ends_the_run(slurm, lab, calm, start):
    first = start("alone")
    lab.wait_for_step("alone", 20, first)
    kill(first.process.pid)
    first.wait()
    wait_until(lambda: state(slurm, job_of(lab, "alone")) == "COMPLETED", 200)
    second = start("alone")
    assert second.wait() == 0, second.log.read_text()
    assert lab.same("alone", "calm-slurm")["attempts"] == 1


@pytest.mark.parametrize("watched", [True, False])
def test_a_warned_job_is_requeued_and_resumes_bitwise(slurm, lab, calm, start, watched):
    name = f"warned-{watched}".lower()
    command = start(name)
    lab.wait_for_step(name, 20, command)
    job = job_of(lab, name)
    if not watched:
        kill(command.process.pid)
        command.wait()
    slurm("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@N sends when the time is nearly up
    wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", job), 60)
    wait_until(lambda: state(slurm, job) == "COMPLETED", 300)
    command = command if watched else start(name)
    assert command.wait() == 0, command.log.read_text()
    assert lab.same(name, "calm-slurm")["attempts"] == 1
    assert "start 2" in (lab.run_dir(name) / "logs" / "attempt-01" / f"slurm-{job}.log").read_text()


def test_a_requeued_job_resumes_from_the_newest_checkpoint(slurm, lab, calm, start):
    command = start("lost")
    lab.wait_for_step("lost", 35, command)
    job = job_of(lab, "lost")
    slurm("scontrol", "requeue", job)  # as when its node fails: no warning, the processes are killed
    wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", job), 120)
    assert command.wait(400) == 0, command.log.read_text()
    lab.same("lost", "calm-slurm")
    assert json.loads((lab.run_dir("lost") / "logs" / "attempt-01" / "job.json").read_text())["from_step"] >= 30


def test_scancel_ends_the_run_with_a_checkpoint_and_the_same_command_resumes(slurm, lab, calm, start):
    command = start("cancelled")
    lab.wait_for_step("cancelled", 20, command)
    slurm("scancel", job_of(lab, "cancelled"))
    assert command.wait() == 75, command.log.read_text()
    assert "was cancelled (scancel)" in command.log.read_text()
    record = json.loads((lab.run_dir("cancelled") / "attempts.jsonl").read_text())
    assert record["kind"] == "preempted" and record["checkpoint_step"] == record["step"] > 0
    again = start("cancelled")
    assert again.wait() == 0, again.log.read_text()
    assert lab.same("cancelled", "calm-slurm")["attempts"] == 2


def test_ctrl_c_ends_the_job_with_a_checkpoint(slurm, lab, calm, start):
    command = start("ctrl-c")
    lab.wait_for_step("ctrl-c", 20, command)
    job = job_of(lab, "ctrl-c")
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 75, command.log.read_text()
    wait_until(lambda: state(slurm, job) == "FAILED")
    assert "ExitCode=75:0" in slurm("scontrol", "show", "job", job)
    record = json.loads((lab.run_dir("ctrl-c") / "attempts.jsonl").read_text())
    assert record["kind"] == "preempted" and record["checkpoint_step"] == record["step"] > 0
    again = start("ctrl-c")
    assert again.wait() == 0, again.log.read_text()
    lab.same("ctrl-c", "calm-slurm")


def test_an_error_of_sbatch_is_reported(slurm, lab, start):
    command = start("refused", "environment.slurm.partition=nowhere")
    assert command.wait() == 64
    assert "sbatch refused the job" in command.log.read_text() and "partition=nowhere" in command.log.read_text()
