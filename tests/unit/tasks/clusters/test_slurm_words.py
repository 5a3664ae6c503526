"""What the Slurm launcher asks for, and how strictly it reads what Slurm's commands print."""

import subprocess
from pathlib import Path

import pytest

from infini_llama.configs.problems import validate
from infini_llama.configs.schema import SlurmConfig
from infini_llama.tasks.clusters import slurm
from infini_llama.tasks.clusters.slurm import SlurmJob, Unanswered, job_environment, name_of, options, state_of
from support.records import make_plan

ATTEMPT = Path("/state/runs/big/logs/attempt-03")
PLAN = make_plan(nnodes=4, nproc_per_node=8, threads=6, device="cuda")
SHOWN = "JobId=17 JobName=big JobState={state} Reason=None ExitCode={code} Restarts=0"


def answers(monkeypatch, **by_command) -> None:
    """Each command prints its text, or fails with it where that is a CalledProcessError or Unanswered."""

    def run(command: list[str], environment: dict | None = None) -> str:
        answer = by_command[command[0]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(slurm, "_run", run)


def refused(words: str) -> subprocess.CalledProcessError:
    return subprocess.CalledProcessError(1, "scontrol", stderr=words)


def test_options_ask_for_one_task_a_node_with_its_cores_and_gpus_and_a_warning_in_time():
    settings = SlurmConfig(partition="gpu", account="lab", time_limit="2-0", options=["--constraint=h100"])
    asked = options(ATTEMPT, settings, PLAN, 42.5)
    for option in ("--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=48", "--gpus-per-node=8", "--requeue"):
        assert option in asked
    assert "--signal=B:USR1@103" in asked and "--partition=gpu" in asked and "--time=2-0" in asked
    assert asked[-1] == "--constraint=h100" and f"--job-name={name_of(ATTEMPT)}" in asked


@pytest.mark.parametrize(
    "option", ["--wrap=rm", "--requeue", "--job-name=x", "--array=1-3", "constraint", "--a b\n--wrap=x", "-w"]
)
def test_options_that_the_launcher_relies_on_or_that_are_none_are_refused(option):
    _, problems = validate({"environment": {"slurm": {"options": [option]}}})
    assert any("environment.slurm.options" in problem for problem in problems)


@pytest.mark.parametrize(
    ("text", "fine"), [("90", True), ("12:00:00", True), ("2-0", True), ("2-12:30", True), ("2 hours", False)]
)
def test_durations_are_read_as_slurm_writes_them(text, fine):
    _, problems = validate({"environment": {"slurm": {"time_limit": text}}})
    assert any("time_limit" in problem for problem in problems) is not fine


def test_the_environment_of_a_surrounding_job_does_not_reach_the_new_one():
    kept = job_environment(
        {"SLURM_JOB_ID": "3", "SBATCH_PARTITION": "x", "SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin"}
    )
    assert kept == {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "PYTHONSAFEPATH": "1"}


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [("RUNNING", "0:0", ("RUNNING", 0)), ("FAILED", "75:0", ("FAILED", 75)), ("CANCELLED", "0:15", ("CANCELLED", -15))],
)
def test_states_and_codes_are_read_from_the_controller(monkeypatch, state, code, expected):
    answers(monkeypatch, scontrol=SHOWN.format(state=state, code=code))
    assert state_of(17) == expected


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "JobId=18 JobState=RUNNING ExitCode=0:0",
        SHOWN.format(state="DANCING", code="0:0"),
        SHOWN.format(state="FAILED", code="x"),
    ],
)
def test_an_unparsable_answer_is_ignored(monkeypatch, shown):
    answers(monkeypatch, scontrol=shown)
    with pytest.raises(Unanswered):
        state_of(17)


def test_a_job_unknown_to_the_controller_is_looked_up_in_the_accounting(monkeypatch):
    forgotten = refused("slurm_load_jobs error: Invalid job id specified")
    answers(monkeypatch, scontrol=forgotten, sacct="CANCELLED by 1000|0:15\n")
    assert state_of(17) == ("CANCELLED", -15)
    answers(monkeypatch, scontrol=forgotten, sacct=refused("Slurm accounting storage is disabled"))
    assert state_of(17) == ("COMPLETED", 1)  # the ranks' own words decide


def test_a_silent_controller_does_not_end_a_job_and_is_reported_once(monkeypatch, tmp_path, caplog):
    answers(monkeypatch, scontrol=Unanswered("Unable to contact slurm controller"))
    monkeypatch.setattr(slurm, "ASK_EVERY", 0.0)
    job = SlurmJob(tmp_path, 17)
    assert job.poll() is None and job.poll() is None
    assert caplog.text.count("does not answer") == 1
    answers(monkeypatch, scontrol=SHOWN.format(state="COMPLETED", code="0:0"))
    assert job.poll() == 0


def test_the_recorded_exit_code_counts_once_the_job_has_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(slurm, "ASK_AT_END", 0.0)
    (tmp_path / "job-ended").write_text("71\n")
    answers(monkeypatch, scontrol=SHOWN.format(state="COMPLETING", code="0:0"))
    job = SlurmJob(tmp_path, 17)
    assert job.poll() is None
    answers(monkeypatch, scontrol=SHOWN.format(state="FAILED", code="1:0"))
    assert job.poll() == 71


def test_a_completing_job_is_polled_less_often(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(slurm, "state_of", lambda number: asked.append(number) or ("COMPLETING", 0))
    monkeypatch.setattr(slurm, "ASK_AT_END", 3600.0)
    job = SlurmJob(tmp_path, 17)
    assert job.poll() is None and job.poll() is None and len(asked) == 1  # it runs
    (tmp_path / "job-ended").write_text("0\n")
    assert job.poll() is None and job.poll() is None and len(asked) == 1  # it was polled just now
    job.polled -= 3600.0
    assert job.poll() is None and job.poll() is None and len(asked) == 2
