"""A real Slurm, started for a test: munge, controller and two node daemons of Debian's packages, all on this machine."""

import os
import shutil
import signal
import socket
import subprocess
import time

import pytest

from support.waiting import wait_until

NODES = ("node-1", "node-2")
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")
MISSING = pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") for program in NEEDED),
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
    text = CONFIGURATION.format(folder=folder, host=host, ports=[free_port()], nodes=nodes)
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
        for command in (munged, ["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", node] for node in NODES)):
            with (folder / f"{command[0]}-{len(running)}.out").open("wb") as log:
                running.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                )
            time.sleep(1)

        def run(*command: str) -> str:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
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
