"""Training on two hosts: network namespaces with process numbers and host names of their own, and a cable between them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.laboratory import (
    COMMAND,
    Laboratory,
    inject,
    kill,
    own_environment,
    processes_of,
    workers_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        sys.platform != "linux"
        or os.geteuid() != 0
        or not shutil.which("ip")
        or not shutil.which("unshare"),
        reason="two hosts are made of network namespaces: needs root, iproute2 and util-linux",
    ),
]
SETTINGS = ["train.max_steps=80", "environment.communication_timeout=6"]
FAULT = """
def change(module):
    def failing(*arguments):
        raise RuntimeError("the injected fault")
    module.optimizer_step = failing
"""
ADDRESSES = {"a": "10.77.13.1", "b": "10.77.13.2"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)


@dataclass
class Hosts:
    """Two machines, a and b, which share the filesystem and a cable."""

    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(
        self, host: str, name: str, *command: str, **variables: str
    ) -> subprocess.Popen:
        """A command on a host; its output is in `name`.log."""
        program = f'hostname host-{host}; exec "$@"'
        inside = [
            "unshare",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            program,
            "sh",
        ]
        with self.log(name).open("wb") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", f"infini-{host}", *inside, *command],
                env=own_environment(self.folder) | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def cable(self, state: str) -> None:
        """up or down; it is pulled out at host b."""
        ip("-n", "infini-b", "link", "set", "cable", state)


@pytest.fixture
def hosts(tmp_path_factory, lab):
    for host in ADDRESSES:
        ip("netns", "add", f"infini-{host}")
    both = Hosts(lab.home)
    try:
        ip(
            "link",
            "add",
            "cable",
            "netns",
            "infini-a",
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            "infini-b",
        )
        for host, address in ADDRESSES.items():
            ip(
                "-n",
                f"infini-{host}",
                "address",
                "add",
                f"{address}/24",
                "dev",
                "cable",
            )
            for interface in ("lo", "cable"):
                ip("-n", f"infini-{host}", "link", "set", interface, "up")
        yield both
    finally:
        for process in both.started:
            process.kill()
        for host in ADDRESSES:
            ip("netns", "delete", f"infini-{host}")


def command_of(lab: Laboratory, name: str) -> list[str]:
    command = [
        COMMAND,
        "run",
        str(lab.config),
        f"runtime.name={name}",
        f"runtime.home={lab.home}",
        "--no-prefect",
    ]
    return [*command, "environment.nnodes=2", *SETTINGS]


def supervise(
    hosts: Hosts, lab: Laboratory, name: str, *overrides: str, log: str = "a"
) -> subprocess.Popen:
    return hosts.start(
        "a", f"{name}-{log}", *command_of(lab, name), *overrides, NODES_TEST=name
    )


def join(hosts: Hosts, name: str, log: str = "b") -> subprocess.Popen:
    return hosts.start("b", f"{name}-{log}", COMMAND, "join", name, NODES_TEST=name)


def wait_for(
    condition,
    started: list[subprocess.Popen],
    what: str,
    logs: list[Path],
    seconds: float = 240,
):
    until = time.monotonic() + seconds
    while not condition():
        ended = [process for process in started if process.poll() is not None]
        if ended or time.monotonic() > until:
            texts = "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)
            raise AssertionError(f"{what} did not come to pass:\n{texts}")
        time.sleep(0.05)


@pytest.fixture(scope="module")
def assert_undisturbed(lab):
    """Asserts that a run has ended as that of two workers on one machine, and that no process is left of it."""
    lab.finish("one-host", "environment.nproc_per_node=2", *SETTINGS)

    def compare(name: str) -> None:
        lab.assert_same(name, "one-host")
        assert not processes_of(f"NODES_TEST={name}")

    return compare


def test_a_cut_cable_costs_the_steps_since_the_checkpoint_and_not_a_bit(
    hosts, lab, assert_undisturbed
):
    name = "cut"
    logs = [hosts.log(f"{name}-{host}") for host in ADDRESSES]
    supervisor = supervise(hosts, lab, name)
    other = join(hosts, name)
    both = [supervisor, other]
    wait_for(lambda: lab.step(name) >= 25, both, "step 25", logs)
    hosts.cable("down")
    wait_for(lambda: lab.attempts(name), both, "the end of the first attempt", logs)
    time.sleep(3)
    hosts.cable("up")
    assert supervisor.wait(240) == 0, hosts.log(f"{name}-a").read_text()
    assert other.wait(60) == 0, hosts.log(f"{name}-b").read_text()
    assert [record.code for record in lab.attempts(name)] == [70, 0]
    assert_undisturbed(name)


def test_terminated_pods_of_an_indexed_job_save_and_resume_bitwise(
    hosts, lab, assert_undisturbed
):
    """Every pod runs the same command as process 1, knows its index from its environment, and gets SIGTERM when it is deleted."""
    name = "pods"
    command = command_of(lab, name)

    def start(number: int) -> list[subprocess.Popen]:
        return [
            hosts.start(
                host,
                f"{name}-{host}{number}",
                *command,
                NODES_TEST=name,
                JOB_COMPLETION_INDEX=str(index),
            )
            for index, host in enumerate(ADDRESSES)
        ]

    logs = [hosts.log(f"{name}-{host}1") for host in ADDRESSES]
    pods = start(1)
    wait_for(lambda: lab.step(name) >= 15, pods, "step 15", logs)
    commands = [
        pid
        for pid, line in processes_of(f"NODES_TEST={name}").items()
        if "infini-llama run" in line
    ]
    for pid in commands:
        if (
            Path(f"/proc/{pid}/status")
            .read_text()
            .split("NSpid:")[1]
            .split("\n")[0]
            .split()[-1]
            == "1"
        ):
            os.kill(pid, signal.SIGTERM)
    assert [pod.wait(120) for pod in pods] == [75, 75], "\n".join(
        log.read_text() for log in logs
    )
    (record,) = lab.attempts(name)
    assert record.kind == "preempted" and record.checkpoint_step == record.step > 0
    pods = start(2)
    assert [pod.wait(240) for pod in pods] == [0, 0], hosts.log(
        f"{name}-a2"
    ).read_text()
    assert_undisturbed(name)


def pid_of(name: str, command: str) -> int:
    """The process of a host that runs this of our commands."""
    ours = processes_of(f"NODES_TEST={name}").items()
    return next(
        pid
        for pid, line in ours
        if f"infini-llama {command}" in line and "unshare" not in line
    )


def test_a_stopped_node_and_a_killed_supervisor_resume_bitwise(
    hosts, lab, assert_undisturbed
):
    name = "struck"
    logs = [hosts.log(f"{name}-{who}") for who in ("a", "b", "b2", "a2")]
    for log in logs:
        log.touch()
    started = [supervise(hosts, lab, name), join(hosts, name)]
    wait_for(lambda: lab.step(name) >= 15, started, "step 15", logs)
    os.kill(pid_of(name, "join"), signal.SIGTERM)
    assert started[1].wait(120) == 75, logs[1].read_text()
    other = join(hosts, name, log="b2")
    started = [started[0], other]
    wait_for(
        lambda: [record.code for record in lab.attempts(name)] == [75],
        started,
        "attempt 1's end",
        logs,
    )
    wait_for(lambda: lab.step(name) >= 40, started, "step 40", logs)
    kill(pid_of(name, "run"))
    assert started[0].wait(60) != 0
    started = [supervise(hosts, lab, name, log="a2"), other]
    assert started[0].wait(300) == 0, logs[3].read_text()
    assert other.wait(60) == 0, logs[2].read_text()
    codes = [record.code for record in lab.attempts(name)]
    assert codes[0] == 75 and codes[-1] == 0 and 70 in codes
    assert_undisturbed(name)


def test_a_rank_that_hangs_on_the_other_host_is_named_and_ended_there(
    hosts, lab, assert_undisturbed
):
    name = "hung"
    logs = [hosts.log(f"{name}-{host}") for host in ADDRESSES]
    patient = ["runtime.hang_timeout=5", "environment.communication_timeout=600"]
    both = [supervise(hosts, lab, name, *patient), join(hosts, name)]
    wait_for(lambda: lab.step(name) >= 25, both, "step 25", logs)
    ranks = workers_of(f"NODES_TEST={name}")
    far = [pid for pid in ranks if host_of(pid) == "b"]
    assert len(ranks) == 2 and len(far) == 1
    os.kill(far[0], signal.SIGSTOP)
    assert both[0].wait(300) == 0, logs[0].read_text()
    assert both[1].wait(60) == 0, logs[1].read_text()
    hang, done = lab.attempts(name)
    assert (hang.code, done.code) == (76, 0)
    assert (
        "rank 1 on host-b (node 1) (the process is stopped) has sent no heartbeat for"
        in hang.message
    )
    assert_undisturbed(name)


def test_a_run_that_is_not_retried_ends_on_both_hosts(hosts, lab, tmp_path):
    name = "unretried"
    fault = inject(tmp_path, "infini_llama.tasks.train.worker.trainer", FAULT)
    both = [
        supervise(
            hosts, lab, name, fault, "runtime.retries=1", "runtime.retry_delay=3"
        ),
        join(hosts, name),
    ]
    assert both[0].wait(300) == 70, hosts.log(f"{name}-a").read_text()
    assert both[1].wait(60) == 70, hosts.log(f"{name}-b").read_text()
    assert [record.code for record in lab.attempts(name)] == [70, 70]
    again = [supervise(hosts, lab, name, log="a2"), join(hosts, name, log="b2")]
    assert [process.wait(300) for process in again] == [0, 0], hosts.log(
        f"{name}-b2"
    ).read_text()


def host_of(pid: int) -> str:
    """Which of the two hosts a process is on, by its network."""
    network = Path(f"/proc/{pid}/ns/net").stat().st_ino
    return next(
        host
        for host in ADDRESSES
        if Path(f"/run/netns/infini-{host}").stat().st_ino == network
    )
