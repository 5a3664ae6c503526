"""deploy/slurm/train.sbatch on a real Slurm of one machine, started for the test: submit, warning, requeue, scancel."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.laboratory import exact_metrics
from support.slurm_cluster import MISSING, slurm, state, wait_for

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), MISSING]
__all__ = ["slurm"]  # a fixture


@pytest.fixture
def submit(slurm, lab):
    def start(name: str, *options: str) -> str:
        environment = slurm.environment | {
            "INFINI_LLAMA_HOME": str(lab.home),
            "PATH": f"{Path(sys.executable).parent}:{slurm.environment['PATH']}",
        }
        command = ["sbatch", "--parsable", f"--output={lab.home}/{name}.out", *options, str(SCRIPT), str(lab.config)]
        command += [f"runtime.name={name}", f"runtime.home={lab.home}", "train.max_steps=400"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return start


def wait_for_step(lab, slurm, name: str, job: str, step: int) -> None:
    def reached():
        assert state(slurm, job) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"), (
            lab.home / f"{name}.out"
        ).read_text()
        return lab.step(name) >= step

    wait_for(reached, 180)


@pytest.fixture(scope="module")
def calm(lab):
    assert lab.start("calm", "train.max_steps=400").wait(600) == 0
    return exact_metrics(lab.run_dir("calm"))


def test_a_warning_puts_the_job_back_and_it_carries_on_to_the_bit(slurm, submit, lab, calm):
    job = submit("script-warned")
    wait_for_step(lab, slurm, "script-warned", job, 30)
    slurm("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@120 sends when the time is nearly up
    wait_for(lambda: "Restarts=1" in slurm("scontrol", "show", "job", job), 60)
    wait_for(lambda: state(slurm, job) == "COMPLETED", 400)
    assert exact_metrics(lab.run_dir("script-warned")) == calm
    assert "start 2" in (lab.home / "script-warned.out").read_text()


def test_scancel_ends_the_job_with_a_checkpoint_and_the_same_submission_carries_on(slurm, submit, lab, calm):
    job = submit("script-cancelled")
    wait_for_step(lab, slurm, "script-cancelled", job, 30)
    slurm("scancel", job)
    wait_for(lambda: state(slurm, job) == "CANCELLED" and not slurm("squeue", "--noheader", "--jobs", job).strip(), 90)
    assert "the newest checkpoint is at step" in (lab.home / "script-cancelled.out").read_text()
    again = submit("script-cancelled")
    wait_for(lambda: state(slurm, again) == "COMPLETED", 400)
    assert exact_metrics(lab.run_dir("script-cancelled")) == calm


def test_a_node_that_dies_costs_the_steps_since_the_last_checkpoint(slurm, submit, lab, calm):
    job = submit("script-lost")
    wait_for_step(lab, slurm, "script-lost", job, 30)
    slurm("scontrol", "requeue", job)
    wait_for(lambda: "Restarts=1" in slurm("scontrol", "show", "job", job), 120)
    wait_for(lambda: state(slurm, job) == "COMPLETED", 400)
    assert exact_metrics(lab.run_dir("script-lost")) == calm
