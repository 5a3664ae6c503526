"""Who is taken for hung, when, and which rank is named."""

import time

import pytest

from tasks.train.supervisor import Hung, Watch
from tasks.train.worker.heartbeat import LINE, Heartbeat, heartbeat_path, read_heartbeat
from tasks.train.worker.status import write_status


def place(folder, rank: int, step: int, phase: str, ago: float) -> None:
    """Rank `rank` entered `phase` of the step after `step` some seconds ago."""
    heartbeat_path(folder, rank).write_text(LINE.format(step=step, phase=phase, time=time.monotonic() - ago))


@pytest.fixture
def watch(tmp_path):
    for rank in range(3):
        write_status(tmp_path, rank, "running", 70)
        place(tmp_path, rank, 7, "compute", 0.0)
    watch = Watch(tmp_path, 3, patience=5.0)
    watch.longest = {"compute": 1.0, "data": 0.1}
    return watch


def test_a_sign_of_life_is_read_as_it_was_written(tmp_path):
    heart = Heartbeat(tmp_path, 4)
    assert read_heartbeat(heartbeat_path(tmp_path, 4))[:2] == (0, "start")
    heart.beat("compute", 123456)
    heart.beat("data")
    step, phase, moment = read_heartbeat(heartbeat_path(tmp_path, 4))
    assert (step, phase) == (123456, "data") and abs(time.monotonic() - moment) < 5
    assert read_heartbeat(tmp_path / "nothing") is None


def test_nobody_is_hung_while_all_move(watch):
    assert watch.hung() is None


def test_a_known_phase_has_twice_its_longest_time_and_the_patience(watch, tmp_path):
    assert watch.limit("compute") == 7.0 and watch.limit("save") == 150.0
    place(tmp_path, 1, 7, "compute", 6.5)
    assert watch.hung() is None
    place(tmp_path, 1, 7, "compute", 7.5)
    with pytest.raises(Hung, match=r"rank 1 has not moved for [78] s in phase 'compute' after step 7"):
        watch.poll()


def test_the_rank_in_the_earlier_step_or_phase_is_named_although_others_wait_longer(watch, tmp_path):
    place(tmp_path, 0, 7, "compute", 9.0)
    place(tmp_path, 1, 7, "data", 8.0)
    place(tmp_path, 2, 7, "compute", 9.5)
    assert watch.hung().startswith("rank 1 ")
    place(tmp_path, 2, 6, "save", 8.0)
    assert watch.hung().startswith("rank 2 ")


def test_times_are_learned_from_what_is_seen(watch, tmp_path):
    watch.hung()
    place(tmp_path, 0, 7, "save", -30.0)  # it entered save 30 s after it entered compute
    watch.hung()
    assert watch.longest["compute"] == pytest.approx(30.0, abs=0.5)


def test_a_rank_that_never_spoke_is_named_when_the_others_wait(watch, tmp_path):
    heartbeat_path(tmp_path, 2).unlink()
    place(tmp_path, 0, 0, "compute", 100.0)
    assert "rank 2 has not given a sign of life" in watch.hung()


def test_ranks_that_ended_are_not_waited_for(watch, tmp_path):
    place(tmp_path, 1, 7, "compute", 100.0)
    write_status(tmp_path, 1, "done", 0)
    assert watch.hung() is None
