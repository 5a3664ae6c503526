"""environment.launcher=srun on a real Slurm of two nodes: srun's own allocation, sbatch, requeue, scancel, time limit, kills."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from support.laboratory import COMMAND, kill, own_environment, processes_of
from support.services import free_port
from support.waiting import wait_until

NODES = ("node-1", "node-2")
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")
MISSING = pytest.mark.skipif(
    os.geteuid() != 0
    or not all(
        shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
        for program in NEEDED
    ),
    reason="starts a Slurm of its own: needs root and slurmctld, slurmd and munge on PATH",
)
# A requeued job waits until the credential of its last start has expired: 10 s here, two minutes by default.
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=60
OverTimeLimit=0
MinJobAge=600
RebootProgram=/bin/true
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Runs one of Slurm's commands on a cluster of this machine alone; returns what it prints."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in (*(f"spool-{node}" for node in NODES), "state"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={os.cpu_count()} State=UNKNOWN"
        for node in NODES
    )
    text = CONFIGURATION.format(
        folder=folder, host=host, ports=[free_port()], nodes=nodes
    )
    (folder / "slurm.conf").write_text(text)
    environment = os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{os.environ['PATH']}:/usr/sbin",
    }
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={folder}/munge.key",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    ]
    running = []
    try:
        for command in (
            munged,
            ["slurmctld", "-D", "-c"],
            *(["slurmd", "-D", "-N", node] for node in NODES),
        ):
            with (folder / f"{command[0]}-{len(running)}.out").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            time.sleep(1)

        def run(*command: str) -> str:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            return done.stdout + done.stderr

        wait_until(lambda: run("sinfo", "--noheader", "-N").count("idle") == len(NODES))
        run.environment = environment
        yield run
    finally:
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def state(slurm, job: str) -> str:
    shown = slurm("scontrol", "show", "job", job)
    return shown.split("JobState=")[1].split()[0]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), MISSING]
SCRIPT = Path(__file__).parents[2] / "deploy" / "train.sbatch"
STEPS = ["train.max_steps=80", "environment.communication_timeout=60"]


@pytest.fixture(scope="module")
def calm(lab):
    """Two workers on one machine that nothing disturbs."""
    return lab.finish("calm-srun", "environment.nproc_per_node=2", *STEPS)


@pytest.fixture
def submit(slurm, lab):
    """Submits deploy/train.sbatch for a run on both nodes; returns the job's number."""

    def batch(name: str, *options: str) -> str:
        environment = (
            own_environment(lab.home) | slurm.environment | {"SRUN_TEST": name}
        )
        environment["PATH"] = f"{Path(COMMAND).parent}:{environment['PATH']}"
        slurm.environment.update(environment)
        settings = [f"runtime.name={name}", f"runtime.home={lab.home}", *STEPS]
        said = slurm(
            "sbatch",
            "--parsable",
            "--cpus-per-task=1",
            "--gpus-per-node=0",
            f"--output={lab.home}/{name}.out",
            *options,
            str(SCRIPT),
            str(lab.config),
            *settings,
        )
        assert re.fullmatch(r"\d+\s*", said), said
        return said.strip()

    return batch


def wait_for_step(slurm, lab, name: str, job: str, step: int) -> None:
    def reached() -> bool:
        assert state(slurm, job) in ("PENDING", "CONFIGURING", "RUNNING"), (
            lab.home / f"{name}.out"
        ).read_text()
        return lab.step(name) >= step

    wait_until(reached, 240)


def ended(slurm, lab, name: str, job: str, wanted: str) -> None:
    wait_until(
        lambda: state(slurm, job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"),
        300,
    )
    assert state(slurm, job) == wanted, (lab.home / f"{name}.out").read_text()
    wait_until(lambda: not processes_of(f"SRUN_TEST={name}"), 30)


def torchruns(name: str) -> list[int]:
    ours = processes_of(f"SRUN_TEST={name}").items()
    return [
        pid
        for pid, line in ours
        if "tasks.train.torchrun" in line and "slurm" not in line.split()[0]
    ]


def test_srun_requests_two_nodes_and_trains_the_same_weights(slurm, lab, calm):
    settings = [
        "environment.launcher=srun",
        "environment.nnodes=2",
        "environment.srun_options=[--partition=all]",
    ]
    lab.finish("asked", *STEPS, *settings, env=slurm.environment)
    assert lab.assert_same("asked", "calm-srun")["attempts"] == 1
    hosts = {
        json.loads(path.read_text())["node"]
        for path in lab.run_dir("asked").glob("logs/attempt-01/status-*")
    }
    assert hosts == {0, 1}


def test_a_stopped_command_saves_a_checkpoint_and_ends_its_step(slurm, lab, calm):
    settings = [*STEPS, "environment.launcher=srun", "environment.nnodes=2"]
    lab.stop_at(20, "stopped", *settings, env=slurm.environment)
    (record,) = lab.attempts("stopped")
    assert record.kind == "preempted" and record.checkpoint_step == record.step > 0
    lab.finish("stopped", *settings, env=slurm.environment)
    lab.assert_same("stopped", "calm-srun")


def test_no_process_outlives_a_killed_command(slurm, lab, calm):
    settings = [*STEPS, "environment.launcher=srun", "environment.nnodes=2"]
    started = lab.start("killed", *settings, env=slurm.environment)
    lab.wait_for_step("killed", 20, started)
    kill(started.process.pid)
    started.wait()
    wait_until(lambda: not started.processes(), 60)
    lab.finish("killed", *settings, env=slurm.environment)
    lab.assert_same("killed", "calm-srun")


def test_a_partition_that_does_not_exist_is_reported(slurm, lab):
    settings = [
        *STEPS,
        "environment.launcher=srun",
        "environment.srun_options=[--partition=nowhere]",
    ]
    started = lab.start(
        "refused", *settings, "runtime.retries=0", env=slurm.environment
    )
    assert started.wait() == 70
    assert (
        "environment.srun_options" in started.log.read_text()
        and "partition" in started.log.read_text()
    )


def test_a_job_near_its_time_limit_is_requeued_and_resumes_bitwise(
    slurm, lab, calm, submit
):
    job = submit("limit")
    wait_for_step(slurm, lab, "limit", job, 20)
    # What --signal=B:USR1@N sends when the time is nearly up.
    slurm("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", job), 60)
    ended(slurm, lab, "limit", job, "COMPLETED")
    assert lab.assert_same("limit", "calm-srun")["attempts"] == 2
    assert [record.kind for record in lab.attempts("limit")] == ["preempted", "done"]


def test_a_job_requeued_without_a_signal_resumes_bitwise(slurm, lab, calm, submit):
    job = submit("requeued")
    wait_for_step(slurm, lab, "requeued", job, 35)
    slurm("scontrol", "requeue", job)  # as when a node fails
    wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", job), 120)
    ended(slurm, lab, "requeued", job, "COMPLETED")
    lab.assert_same("requeued", "calm-srun")
    assert lab.attempts("requeued")[-1].from_step >= 30


def test_a_cancelled_job_can_be_submitted_again(slurm, lab, calm, submit):
    job = submit("cancelled")
    wait_for_step(slurm, lab, "cancelled", job, 20)
    slurm("scancel", job)
    ended(slurm, lab, "cancelled", job, "CANCELLED")
    ended(slurm, lab, "cancelled", submit("cancelled"), "COMPLETED")
    lab.assert_same("cancelled", "calm-srun")


@pytest.mark.parametrize("program", ["torchrun", "srun"])
def test_a_killed_torchrun_or_srun_is_one_failed_attempt(
    slurm, lab, calm, submit, program
):
    name = f"{program}-killed"
    job = submit(name)
    wait_for_step(slurm, lab, name, job, 25)
    if program == "torchrun":
        kill(max(torchruns(name)))
    else:
        ours = processes_of(f"SRUN_TEST={name}").items()
        for pid, line in ours:
            if line.startswith("srun "):
                kill(pid)
    ended(slurm, lab, name, job, "COMPLETED")
    lab.assert_same(name, "calm-srun")
    assert [record.code for record in lab.attempts(name)] == [70, 0]
