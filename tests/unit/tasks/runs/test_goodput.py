"""The parts of the wall time, over attempts that ended well and badly."""

import json
import time

import pytest

from infini_llama.tasks.records.metrics import Goodput, StartTime
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.goodput import LEDGER, Ledger, goodput, seconds_after
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    append_attempt,
    read_attempts,
    write_attempt_plan,
)
from infini_llama.tasks.storage.locks import this_machine
from support.records import make_attempt


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path)


def story(
    run,
    number: int,
    began: float,
    from_step: int,
    lines: list[dict],
    seconds: float | None,
    kind: str,
    **end,
) -> None:
    folder = run.path / "logs" / f"attempt-{number:02d}"
    folder.mkdir(parents=True)
    write_attempt_plan(
        folder,
        make_attempt(
            run.path,
            started=StartTime(wall=began, monotonic=0.0, machine="another"),
            from_step=from_step,
        ),
    )
    (folder / LEDGER).write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"cut sho'
    )
    if seconds is not None:
        append_attempt(
            run,
            AttemptRecord(attempt=number, kind=kind, code=0, seconds=seconds, **end),
        )


def line(step: int, at: float, **phases: float) -> dict:
    return {"step": step, "time": at, "phases": phases}


def test_work_done_again_is_lost_and_the_parts_add_up(run):
    first = [
        line(0, 114.0, start=10.0, data=1.0, compute=3.0),  # step 1
        line(1, 118.0, save=0.5, data=0.5, compute=3.0),  # its checkpoint, and step 2
        line(2, 122.0, evaluate=1.0, data=0.5, compute=2.5),  # step 3
    ]
    story(run, 1, 100.0, 0, first, 30.0, "failed")  # 8 s of a step that nobody finished
    # Killed with its command.
    story(run, 2, 135.0, 1, [line(1, 140.0, start=2.0, compute=3.0)], None, "")
    third = [line(1, 152.0, start=2.0, data=1.0, compute=5.0), line(2, 153.0, save=1.0)]
    story(run, 3, 144.0, 1, third, 10.0, "done")
    found = goodput(run)
    assert found.wall == 54.0 == pytest.approx(sum(found.parts().values()))
    assert found.down == 5.0 + 4.0
    assert found.start_up == 10.0 + 2.0 + 2.0
    assert (found.training, found.save, found.data_wait) == (
        3.0 + 5.0,
        0.5 + 1.0,
        1.0 + 1.0,
    )
    assert found.lost_work == (3.5 + 4.0 + 8.0) + 3.0
    assert found.ending == 1.0 and found.evaluation == 0.0


@pytest.mark.parametrize("kept", [(1, 2), (0, 2), (0, 1), ()], ids=str)
def test_lost_lines_of_a_ledger_are_named(run, caplog, kept):
    lines = [
        line(0, 14.0, start=4.0),
        line(1, 16.0, compute=2.0),
        line(2, 19.0, compute=3.0),
    ]
    story(run, 1, 10.0, 0, lines, 9.5, "done", step=2)
    assert goodput(run).training == 5.0 and caplog.text.count(LEDGER) == 1, (
        "only the line that was cut short"
    )
    ledger = run.path / "logs" / "attempt-01" / LEDGER
    ledger.write_text("".join(json.dumps(lines[number]) + "\n" for number in kept))
    caplog.clear()
    goodput(run)
    assert f"{ledger} has lost lines" in caplog.text


def test_a_line_with_a_phase_of_another_version_is_named_and_not_counted(run, caplog):
    lines = [line(0, 14.0, start=4.0), line(1, 16.0, compute=1.0, forward=1.0)]
    story(run, 1, 10.0, 0, lines, 9.5, "done", step=1)
    assert goodput(run).training == 0.0
    assert "line 2, 3 cannot be read" in caplog.text


def test_an_attempt_with_no_step_left_has_lost_no_line(run, caplog):
    """Resumed at step 40 with a train.max_steps of 30."""
    story(run, 1, 10.0, 40, [line(0, 14.0, start=4.0)], 5.0, "done", step=40)
    assert goodput(run).start_up == 4.0 and "has lost lines" not in caplog.text


def test_the_hundredth_attempt_comes_after_the_ninety_ninth(run):
    story(run, 99, 10.0, 0, [line(0, 14.0, compute=4.0)], 4.0, "preempted")
    story(run, 100, 20.0, 1, [line(1, 25.0, compute=5.0)], 5.0, "done")
    found = goodput(run)
    assert (found.wall, found.down, found.lost_work, found.training) == (
        15.0,
        6.0,
        0.0,
        9.0,
    )


def test_a_later_attempt_that_starts_anew_loses_everything_before(run):
    story(
        run,
        1,
        0.0,
        0,
        [line(0, 5.0, start=1.0, compute=4.0), line(1, 6.0, save=1.0)],
        6.0,
        "preempted",
    )
    assert goodput(run).lost_work == 0.0
    assert goodput(run, from_step=0, now=7.0).lost_work == 5.0


def test_a_clock_that_goes_back_between_attempts_leaves_no_wall_time_below_its_parts(
    run,
):
    story(run, 1, 100.0, 0, [line(0, 105.0, start=1.0, compute=4.0)], 6.0, "preempted")
    story(run, 2, 60.0, 1, [line(1, 70.0, start=2.0, compute=8.0)], 10.0, "done")
    found = goodput(run)
    assert (
        found.wall == sum(found.parts().values()) == 16.0 and found.share == 12.0 / 16.0
    )


def test_a_ledger_counts_on_from_the_attempts_before(tmp_path):
    before = Goodput(training=5.0, lost_work=2.0, wall=9.0)
    began = StartTime(
        wall=1000.0, monotonic=time.monotonic() - 3.0, machine=this_machine()
    )
    ledger = Ledger(tmp_path / LEDGER, began, before)
    ledger.leave("start")
    ledger.leave("compute")
    ledger.close_step(4)
    spent = ledger.spent()
    assert (
        spent.start_up == pytest.approx(3.0, abs=0.5)
        and spent.training >= 5.0
        and spent.lost_work == 2.0
    )
    assert sum(spent.parts().values()) - 7.0 == pytest.approx(
        spent.wall - 9.0, abs=1e-6
    )
    written = json.loads((tmp_path / LEDGER).read_text())
    assert written["step"] == 4 and set(written["phases"]) == {"start", "compute"}


def test_the_clock_of_a_supervisor_on_another_machine_is_not_used(tmp_path):
    began = StartTime(
        wall=time.time() - 3.0, monotonic=time.monotonic() + 1e6, machine="another"
    )
    ledger = Ledger(tmp_path / LEDGER, began, Goodput())
    ledger.leave("start")
    assert ledger.spent().start_up == pytest.approx(3.0, abs=1.0)


def test_neither_the_id_nor_the_record_of_attempts_is_read_for_each_attempt(
    run, monkeypatch
):
    """The ID goes through the folders of all attempts, of which a preempted run can have a thousand."""
    read_id = RunFolder.read_id
    ids, records = list[str](), list[RunFolder]()
    for number in range(1, 6):
        story(
            run,
            number,
            100.0 * number,
            0,
            [line(0, 100.0 * number + 1.0, start=1.0)],
            1.0,
            "failed",
        )
    monkeypatch.setattr(
        RunFolder, "read_id", lambda self: [ids.append(""), read_id(self)][1]
    )
    monkeypatch.setattr(
        "infini_llama.tasks.runs.goodput.read_attempts",
        lambda of: records.append(of) or read_attempts(of),
    )
    assert goodput(run).down == 4 * 99.0 and len(ids) <= 2 and len(records) == 1


def test_seconds_after_a_save_count_lost_attempts_and_no_start_up(run):
    assert seconds_after(run, 0) == 0.0
    first = [
        line(0, 114.0, start=10.0, data=1.0, compute=3.0),  # step 1
        line(
            1, 118.0, evaluate=2.0, save=0.5, data=0.5, compute=3.0
        ),  # its save, and step 2
        line(2, 123.0, evaluate=1.0, data=0.5, compute=2.5, samples=1.0),  # step 3
    ]
    story(run, 1, 100.0, 0, first, 30.0, "failed")
    assert seconds_after(run, 1) == (0.5 + 3.0) + (1.0 + 0.5 + 2.5 + 1.0)
    second = [line(1, 140.0, start=2.0, compute=4.0, metrics_hook=1.0)]
    story(run, 2, 135.0, 1, second, None, "")
    assert seconds_after(run, 1) == 8.5 + 5.0
    assert seconds_after(run, 2) == 0.0, "the second attempt has saved it"
    assert seconds_after(run, 0) == (1.0 + 3.0) + (2.0 + 0.5 + 3.5) + 5.0 + 5.0
