"""deploy/slurm/train.sbatch on a real Slurm of one machine, started for the test: submit, warning, requeue, scancel."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from laboratory import exact_metrics

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.geteuid() != 0
        or not all(shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") for program in NEEDED),
        reason="needs root and Debian's slurmctld, slurmd and munge",
    ),
]
# A requeued job waits until the credential of its last start has expired: 10 s here, two minutes by default.
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=60
MinJobAge=600
RebootProgram=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition, seconds: float = 120):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.1)
    return value


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Runs one of Slurm's commands on a cluster of this machine alone; returns what it prints."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("spool", "state"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    host = socket.gethostname().split(".")[0]
    ports = (free_port(), free_port())
    text = CONFIGURATION.format(folder=folder, host=host, ports=ports, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    munged += [
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    ]
    running = []
    try:
        for command in (munged, ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", host]):
            with (folder / f"{command[0]}.out").open("wb") as log:
                running.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                )
            time.sleep(1)

        def run(*command: str) -> str:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
            return done.stdout + done.stderr

        wait_for(lambda: "idle" in run("sinfo", "--noheader"))
        run.environment = environment
        yield run
    finally:
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


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


def state(slurm, job: str) -> str:
    shown = slurm("scontrol", "show", "job", job)
    return shown.split("JobState=")[1].split()[0]


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
    job = submit("warned")
    wait_for_step(lab, slurm, "warned", job, 30)
    slurm("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@120 sends when the time is nearly up
    wait_for(lambda: "Restarts=1" in slurm("scontrol", "show", "job", job), 60)
    wait_for(lambda: state(slurm, job) == "COMPLETED", 400)
    assert exact_metrics(lab.run_dir("warned")) == calm
    assert "start 2" in (lab.home / "warned.out").read_text()


def test_scancel_ends_the_job_with_a_checkpoint_and_the_same_submission_carries_on(slurm, submit, lab, calm):
    job = submit("cancelled")
    wait_for_step(lab, slurm, "cancelled", job, 30)
    slurm("scancel", job)
    wait_for(lambda: state(slurm, job) == "CANCELLED" and not slurm("squeue", "--noheader", "--jobs", job).strip(), 90)
    assert "the newest checkpoint is at step" in (lab.home / "cancelled.out").read_text()
    again = submit("cancelled")
    wait_for(lambda: state(slurm, again) == "COMPLETED", 400)
    assert exact_metrics(lab.run_dir("cancelled")) == calm


def test_a_node_that_dies_costs_the_steps_since_the_last_checkpoint(slurm, submit, lab, calm):
    job = submit("lost")
    wait_for_step(lab, slurm, "lost", job, 30)
    slurm("scontrol", "requeue", job)
    wait_for(lambda: "Restarts=1" in slurm("scontrol", "show", "job", job), 120)
    wait_for(lambda: state(slurm, job) == "COMPLETED", 400)
    assert exact_metrics(lab.run_dir("lost")) == calm
