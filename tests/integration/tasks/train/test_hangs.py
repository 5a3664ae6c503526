"""When a rank is taken for hung, and which one is named: three ranks as files, a clock that the test moves, and real processes."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from infini_llama.tasks.runs import heartbeat as heartbeat_module
from infini_llama.tasks.runs.heartbeat import (
    LINE,
    STACKS,
    Heartbeat,
    heartbeat_path,
    read_count,
    read_heartbeat,
)
from infini_llama.tasks.runs.status import status_path, write_status
from infini_llama.tasks.storage.record_files import read_fields, write_fields
from infini_llama.tasks.train.hangs import HangDetector, Hung
from support.waiting import wait_until


class Clock:
    """This process's clock, which the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float, watch: HangDetector) -> None:
        """Moves on, with the looks that a supervisor takes meanwhile."""
        for _ in range(round(2 * seconds)):
            watch.hung()
            self.now += 0.5


def place(folder, rank: int, step: int, phase: str, moment: float = 0.0) -> None:
    """Rank `rank` entered `phase` of the step after `step` at `moment` of its own host's clock."""
    heartbeat_path(folder, rank).write_text(
        LINE.format(step=step, phase=phase, time=moment)
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(tmp_path, clock):
    """Three ranks, just seen in the step after 7."""
    for rank in range(3):
        write_status(tmp_path, rank, "running", 70)
        place(tmp_path, rank, 7, "compute")
    watch = HangDetector(tmp_path, 3, timeout=5.0, clock=clock)
    watch.longest = {"compute": 1.0, "data": 0.1}
    assert watch.hung() is None
    return watch


def change_status(folder, rank: int, **fields: object) -> None:
    path = status_path(folder, rank)
    write_fields(path, read_fields(path) | fields)


SLEEPING = "import time; time.sleep(100)"


@pytest.fixture
def spawn():
    """spawn(*command): a process that is killed after the test."""
    started = list[subprocess.Popen]()

    def start(*command: str) -> subprocess.Popen:
        started.append(subprocess.Popen(command))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def sleeper(tmp_path, spawn):
    """A process that is rank 1's, as far as its status and its command line say."""
    process = spawn(sys.executable, "-c", SLEEPING, str(tmp_path))
    change_status(tmp_path, 1, pid=process.pid)
    return process


def test_a_stopped_process_has_half_the_timeout(watch, clock, sleeper):
    watch.longest["compute"] = 30.0  # so that silence alone would mean nothing for long
    clock.passes(3.0, watch)
    assert watch.hung() is None
    sleeper.send_signal(signal.SIGSTOP)
    sentence = wait_until(watch.hung)  # the kernel takes a moment to stop it
    assert all(
        word in sentence for word in ("rank 1", "stopped", "3 s", "'compute'", "step 7")
    )
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: watch.hung() is None)


def test_a_process_that_waits_for_a_processor_is_not_hung(tmp_path, spawn):
    """Another program has the processor that this one may run on; without that program it runs, and is silent."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count how long processes wait")
    core = min(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    worker = spawn("nice", "-n", "19", sys.executable, "-c", busy, str(tmp_path))
    other = spawn(sys.executable, "-c", busy)
    write_status(tmp_path, 0, "running", 70)
    change_status(tmp_path, 0, pid=worker.pid)
    place(tmp_path, 0, 7, "compute")
    watch = HangDetector(tmp_path, 1, timeout=1.0, longest={"compute": 0.5})
    for _ in range(60):
        assert watch.hung() is None
        time.sleep(0.1)
    other.kill()
    assert "rank 0" in wait_until(watch.hung)


def test_stacks_are_requested_from_live_workers_of_this_machine_only(
    tmp_path, monkeypatch, spawn
):
    """Rank 0 is one; 1 has ended, and its number is another process's; 2's number is one of another machine."""
    monkeypatch.setattr("infini_llama.tasks.train.hangs.STACKS_SECONDS", 0.0)
    processes = [  # SIGUSR2 ends each
        spawn(sys.executable, "-c", SLEEPING, str(folder))
        for folder in (tmp_path, "elsewhere", tmp_path)
    ]
    for rank, process in enumerate(processes):
        write_status(tmp_path, rank, "running", 70)
        change_status(tmp_path, rank, pid=process.pid)
    change_status(tmp_path, 2, machine="another")
    HangDetector(tmp_path, 3, timeout=5.0).dump_stacks()
    assert processes[0].wait(20) == -signal.SIGUSR2
    assert [process.poll() for process in processes[1:]] == [None, None]


def test_a_measured_phase_has_twice_its_longest_time_plus_the_timeout(watch, clock):
    assert watch.limit("compute") == 7.0 and watch.limit("save") == 150.0
    clock.passes(6.5, watch)
    assert watch.hung() is None
    clock.passes(1.0, watch)
    with pytest.raises(Hung, match=r"rank 0 .* [78] s .*'compute' .*step 7"):
        watch.poll()


def test_the_first_step_of_a_curriculum_stage_is_measured_anew(watch, clock, tmp_path):
    """Also where the last short step of rank 2 is read after the others have begun a long one."""
    watch.stage_ends = (3, 8)
    for rank in range(3):
        place(tmp_path, rank, 8, "compute", 2.0)
        assert watch.hung() is None
    clock.passes(140.0, watch)
    assert watch.hung() is None
    for rank in range(3):
        place(tmp_path, rank, 9, "compute", 142.0)
    assert watch.hung() is None and watch.limit("compute") == 285.0


@pytest.mark.parametrize("moment", [-1e9, 1e9])
def test_the_clock_of_another_host_is_not_used(watch, clock, tmp_path, moment):
    """Neither does one far behind make a moving rank hung, nor one far ahead hide that it hangs."""
    place(tmp_path, 1, 8, "compute", moment)
    assert watch.hung() is None
    clock.passes(6.5, watch)
    place(tmp_path, 0, 8, "compute", 1.0)
    place(tmp_path, 2, 8, "compute", 1.0)
    assert watch.hung() is None
    watch.longest["compute"] = 1.0
    clock.passes(1.0, watch)
    assert watch.hung().startswith("rank 1 ")


def test_the_rank_in_the_earlier_step_or_phase_is_named(watch, clock, tmp_path):
    clock.passes(1.0, watch)
    place(tmp_path, 1, 7, "data")
    watch.hung()
    clock.passes(9.0, watch)
    assert watch.hung().startswith("rank 1 ")
    place(tmp_path, 2, 6, "save")
    assert watch.hung().startswith("rank 2 ")


def test_a_rank_without_a_heartbeat_is_named_when_the_others_wait(tmp_path, clock):
    for rank in range(3):
        write_status(tmp_path, rank, "running", 70)
    place(tmp_path, 0, 0, "compute")
    watch = HangDetector(
        tmp_path, 3, timeout=5.0, longest={"compute": 1.0}, clock=clock
    )
    watch.hung()
    clock.passes(100.0, watch)
    assert "rank 1, 2 " in watch.hung()


def test_a_slow_poll_is_no_absence(watch, clock, tmp_path, monkeypatch):
    """Hundreds of ranks' files on a network filesystem."""

    def slowly(path):
        clock.now += 3.0
        return read_heartbeat(path)

    monkeypatch.setattr("infini_llama.tasks.train.hangs.read_heartbeat", slowly)
    watch.hung()
    place(tmp_path, 0, 8, "compute", 4.0)
    watch.hung()
    assert watch.longest["compute"] == 4.0  # learned, in the look behind a slow one


def test_a_paused_supervisor_reports_no_hung_rank(watch, clock, tmp_path):
    """Ctrl-Z, or a scheduler that suspends the whole job: who goes on first is not for the ranks to answer for."""
    clock.now += 3600.0
    place(tmp_path, 2, 8, "compute", 3600.0)
    assert watch.hung() is None
    clock.passes(1.5, watch)
    assert watch.hung() is None
    assert watch.longest["compute"] == 1.0  # nor is it how long a step takes
    clock.passes(1.5, watch)
    # What counts of the hour, and what came after.
    assert watch.hung().startswith("rank 0 ")


def test_ranks_that_ended_are_not_waited_for(watch, clock, tmp_path):
    clock.passes(100.0, watch)
    for rank in (0, 2):
        place(tmp_path, rank, 8, "compute", 1.0)
    write_status(tmp_path, 1, "done", 0)
    watch.longest["compute"] = 1.0
    assert watch.hung() is None


def test_a_rank_of_another_host_is_named_with_it(watch, clock, tmp_path):
    """Of two ranks at the same place, the one whose process publishes nothing any more is named."""
    for rank in (0, 1):
        change_status(tmp_path, rank, host="far", machine="another", node=3)
    for count in range(9):
        heartbeat_path(tmp_path, 0).write_text(
            LINE.format(step=7, phase="compute", time=0.0) + f"{count:>12}\n"
        )
        place(tmp_path, 2, 8 + count, "compute", 1.0)
        clock.passes(1.0, watch)
    sentence = watch.hung()
    assert sentence.startswith("rank 1 on far (node 3) (the process is stopped)")
    watch.dump_stacks()
    assert (tmp_path / STACKS).exists()


def test_a_rank_publishes_its_heartbeat_and_writes_stacks_on_request(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(heartbeat_module, "PUBLISH_SECONDS", 0.01)
    (tmp_path / STACKS).touch()
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(
            heartbeat_module.faulthandler,
            "dump_traceback",
            partial(faulthandler.dump_traceback, log),
        )
        heartbeat = Heartbeat(tmp_path, 0)
        heartbeat.publish()
        wait_until(lambda: read_count(heartbeat_path(tmp_path, 0)) > 2)
    heartbeat.beat("save", 12)
    assert read_heartbeat(heartbeat_path(tmp_path, 0))[:2] == (12, "save")
    assert "test_hangs.py" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("phase", ["start", "compile", "save"])
def test_one_visit_of_start_up_or_save_does_not_limit_the_next(tmp_path, clock, phase):
    """Imports follow the first "start"; a save that only copies is followed by one that waits for the disk."""
    watch = HangDetector(tmp_path, 1, timeout=5.0, clock=clock)
    write_status(tmp_path, 0, "running", 70)
    for moment, entered in enumerate([phase, "data", phase]):
        place(tmp_path, 0, 0, entered, float(moment))
        assert watch.hung() is None
    clock.passes(100.0, watch)
    assert watch.hung() is None
    clock.passes(60.0, watch)
    assert watch.hung() is not None


def test_the_peers_of_a_killed_rank_are_not_taken_for_hung(watch, clock, tmp_path):
    change_status(tmp_path, 1, pid=2**22 + 1)  # above the kernel's largest number
    clock.passes(60.0, watch)
    assert watch.hung() is None
    clock.passes(10.0, watch)
    assert watch.hung() is not None


@pytest.mark.parametrize(("ended", "named"), [((), "rank 0 "), ((0,), "torchrun")])
def test_a_rank_that_never_starts_and_a_launcher_that_outlives_it_are_found(
    tmp_path, clock, ended, named
):
    """A stopped torchrun never ends, and no rank is there to be silent."""
    watch = HangDetector(tmp_path, 1, timeout=5.0, clock=clock)
    for rank in ended:
        write_status(tmp_path, rank, "done", 0)
    clock.passes(140.0, watch)
    assert watch.hung() is None
    clock.passes(15.0, watch)
    assert named in watch.hung()


def test_rank_timeouts_start_after_the_rendezvous(tmp_path, clock):
    watch = HangDetector(tmp_path, 2, timeout=5.0, clock=clock, after_rendezvous=True)
    clock.passes(1000.0, watch)
    assert watch.hung() is None


def test_work_inside_another_phase_is_seen_and_the_phase_is_kept(tmp_path):
    heartbeat = Heartbeat(tmp_path, 0)
    assert read_heartbeat(heartbeat_path(tmp_path, 0))[:2] == (0, "start")
    heartbeat.beat("compute", 123456)
    with pytest.raises(KeyError), heartbeat.during("save"):
        step, phase, moment = read_heartbeat(heartbeat_path(tmp_path, 0))
        assert (step, phase) == (123456, "save") and abs(time.monotonic() - moment) < 5
        raise KeyError
    assert (
        heartbeat.phase == read_heartbeat(heartbeat_path(tmp_path, 0))[1] == "compute"
    )
