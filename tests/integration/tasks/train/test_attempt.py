"""An attempt's outcome on record, with real processes in the workers' place."""

import errno
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from infini_llama.configs.errors import Preempted, TrainFailed
from infini_llama.configs.loading import parse_config
from infini_llama.tasks.records.status import AttemptRecord, RankError
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    append_attempt,
    read_attempts,
    write_attempt_plan,
)
from infini_llama.tasks.runs.status import read_status, status_path, write_status
from infini_llama.tasks.train import attempt
from infini_llama.tasks.train import launch as local
from infini_llama.tasks.train.attempt import attempts_until_finished, run_attempt
from infini_llama.tasks.train.attempt_folder import (
    RESERVE,
    record_attempt,
    record_killed_attempts,
)
from infini_llama.tasks.train.launch import TorchrunWorkers
from infini_llama.tasks.train.locking import LockedRun
from infini_llama.tasks.train.outcome import Outcome
from infini_llama.tasks.train.processes import is_rank
from infini_llama.tasks.train.retries import Retries
from support.records import make_attempt, make_lineage, make_plan

# Ends by SIGTERM as a worker does, having said that it has saved.
WORKER = """
import signal, sys, time
from pathlib import Path
from infini_llama.tasks.runs.status import write_status

def stop(number, frame):
    signal.signal(number, signal.SIG_IGN)
    time.sleep(0.3)
    write_status(Path(sys.argv[1]), 0, "preempted", 75, step=3)
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
write_status(Path(sys.argv[1]), 0, "running", 70)
time.sleep(100)
"""


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "mine")
    folder.checkpoints.mkdir(parents=True)
    folder.write(folder.lineage, make_lineage())
    return folder


@pytest.fixture
def train(run, monkeypatch):
    """Makes one attempt at the run."""

    def command(attempt_dir: Path, *_: object, **__: object) -> list[str]:
        return [sys.executable, "-c", WORKER, str(attempt_dir)]

    monkeypatch.setattr(local, "torchrun_command", command)
    own = {
        "data": {"source": "python-stdlib"},
        "runtime": {"home": str(run.path.parents[1]), "name": "mine"},
    }

    def make(each_poll=lambda: None, **sections):
        config = parse_config(own | sections)
        return run_attempt(make_attempt(run.path, config), LockedRun((), each_poll))

    make.config = parse_config(own)
    return make


STOPPED = """
import sys
from pathlib import Path
from infini_llama.tasks.runs.status import write_status

write_status(Path(sys.argv[1]), 0, "preempted", 75, step=0)
"""


def test_workers_that_are_stopped_before_any_progress_are_retried_as_failures_are(
    run, train, monkeypatch
):
    monkeypatch.setitem(globals(), "WORKER", STOPPED)
    attempt_of_run = make_attempt(run.path, train.config)
    retries = Retries(2, 0.0, lambda: 0)
    delays = []
    for _ in range(3):
        with pytest.raises(TrainFailed) as stopped:
            attempts_until_finished(attempt_of_run, LockedRun((), lambda: None))
        assert stopped.value.exit_code == 75
        delays.append(retries.delay_after(stopped.value))
    assert delays == [0.0, 0.0, None]
    assert [record.code for record in read_attempts(run)] == [75, 75, 75]


DONE = """
import sys
from pathlib import Path
from infini_llama.tasks.runs.status import write_status

write_status(Path(sys.argv[1]), 0, "done", 0, 16)
"""


def is_up(run: RunFolder, number: int) -> bool:
    status = read_status(run.path / "logs" / f"attempt-{number:02d}", 0)
    return status is not None and status.state == "running"


def test_an_error_of_the_supervisor_is_on_record_after_the_workers_have_saved(
    run, train
):
    def spoil() -> None:
        if is_up(run, 1):
            raise ValueError("a fault of the supervisor")

    with pytest.raises(ValueError, match="a fault of the supervisor"):
        train(spoil)
    record = read_attempts(run)[-1]
    assert (record.kind, record.code, record.step) == ("failed", 70, 3), (
        "and the workers have saved"
    )
    assert "ValueError" in record.message
    attempt_dir = run.path / "logs" / "attempt-01"
    ended = read_status(attempt_dir, 0)
    assert ended is not None and not is_rank(ended.pid, attempt_dir)


def test_a_filesystem_that_does_not_answer_for_a_moment_ends_nothing(run, train):
    """And a request to stop is still one."""
    looks = 0

    def spoil() -> None:
        nonlocal looks
        if is_up(run, 1):
            run.metrics.mkdir(exist_ok=True)  # reading it is an OSError
            looks += 1
        if looks == 3:
            raise KeyboardInterrupt

    with pytest.raises(Preempted, match="was stopped"):
        train(spoil)
    assert (read_attempts(run)[-1].kind, read_attempts(run)[-1].code) == (
        "preempted",
        75,
    )


def test_a_request_before_the_first_step_is_no_failure(run, train):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(Preempted, match="no checkpoint yet"):
        train(interrupt)
    record = read_attempts(run)[-1]
    assert (record.kind, record.code, record.checkpoint_step) == ("preempted", 75, 0)


def test_a_request_after_the_last_step_ends_the_command(run, train, monkeypatch):
    """What would follow in it, an evaluation and the report, is left to the next one."""
    monkeypatch.setattr(sys.modules[__name__], "WORKER", DONE)

    def interrupt_when_done() -> None:
        status = read_status(run.path / "logs" / "attempt-01", 0)
        if status is not None and status.state == "done":
            raise KeyboardInterrupt

    with pytest.raises(Preempted, match="last step"):
        train(interrupt_when_done)
    assert (read_attempts(run)[-1].kind, read_attempts(run)[-1].code) == ("done", 0)


def test_a_repeated_request_is_one(run, train):
    """Slurm signals every process of a job, and the job's script passes its own signal on; Prefect's handler raises each time."""

    def interrupt(number: int, frame: object) -> None:
        raise GeneratorExit  # any BaseException but KeyboardInterrupt, for which subprocess has patience of its own

    def ask_twice() -> None:
        if is_up(run, 1):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with pytest.raises(Preempted, match="was stopped"):
            train(ask_twice)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (read_attempts(run)[-1].kind, read_attempts(run)[-1].code) == (
        "preempted",
        75,
    ), "its workers have saved"


@pytest.mark.parametrize(
    ("where", "place"),
    [(attempt, "prepare"), (TorchrunWorkers, "start"), (attempt, "record_attempt")],
)
def test_a_request_beside_the_watch_leaves_the_attempt_on_record_and_no_worker(
    run, train, monkeypatch, where, place
):
    """While the folder is made, after the workers were started, and while the end is recorded."""
    real = getattr(where, place)

    def interrupted(*arguments):
        result = real(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(where, place, interrupted)
    monkeypatch.setattr(
        sys.modules[__name__], "WORKER", DONE if place == "record_attempt" else WORKER
    )
    with pytest.raises((Preempted, KeyboardInterrupt)):
        train()
    (record,) = read_attempts(run)
    assert record.code == (0 if place == "record_attempt" else 75)
    assert not [
        pid for pid in Path("/proc").glob("[0-9]*") if is_rank(int(pid.name), run.path)
    ]


def test_workers_that_cannot_be_started_leave_a_record(run, train, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(TorchrunWorkers, "start", refuse)
    with pytest.raises(BlockingIOError):
        train()
    (record,) = read_attempts(run)
    assert (record.kind, record.code) == ("failed", 70)


def full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_end_of_an_attempt_is_recorded_on_a_full_disk(run, monkeypatch):
    attempt_dir = run.path / "logs" / "attempt-01"
    attempt_dir.mkdir(parents=True)
    attempt = make_attempt(run.path)
    (attempt_dir / RESERVE).write_bytes(bytes(10))
    append = {True: full, False: append_attempt}
    monkeypatch.setattr(
        "infini_llama.tasks.train.attempt_folder.append_attempt",
        lambda *record: append[(attempt_dir / RESERVE).exists()](*record),
    )
    record_attempt(attempt, attempt_dir, Outcome("failed", 70, "no space"))
    assert [record.message for record in read_attempts(run)] == ["no space"]


def test_an_attempt_refused_by_a_full_disk_is_not_counted(run, train, monkeypatch):
    monkeypatch.setattr(
        "infini_llama.tasks.train.attempt_folder.write_attempt_plan", full
    )
    with pytest.raises(OSError, match="No space"):
        train()
    assert record_killed_attempts(run) == 0 and read_attempts(run) == []


def test_a_rank_on_a_full_disk_reports_why_it_ended(tmp_path, monkeypatch):
    write_status(tmp_path, 0, "running", 70)
    monkeypatch.setattr("infini_llama.tasks.runs.status.write_record", full)
    error = RankError(
        type="PipelineError",
        message="no space",
        traceback="line\n" * 2000,
        sample_rows=tuple([1] * 2000),
    )
    write_status(tmp_path, 0, "failed", 70, 3, error)
    status = read_status(tmp_path, 0)
    assert (status.state, status.step, status.error.message) == (
        "failed",
        3,
        "no space",
    )
    assert status_path(tmp_path, 0).stat().st_size < 4096


def test_prefects_requests_to_stop_are_no_exceptions():
    """Which `attempt` takes for faults."""
    from prefect.exceptions import Pause, TerminationSignal

    assert not any(issubclass(kind, Exception) for kind in (Pause, TerminationSignal))


@pytest.mark.parametrize("word", ["", "[]no", "a folder"])
def test_a_status_that_cannot_be_read_just_now_is_none(tmp_path, word):
    path = status_path(tmp_path, 0)
    if word == "a folder":
        path.mkdir()
    else:
        path.write_text(word)
    assert read_status(tmp_path, 0) is None


@pytest.mark.parametrize("kept", [(), (1,), (2,)])
def test_attempts_are_numbered_on_although_earlier_folders_are_gone(run, train, kept):
    """Restored from a mirror, which has attempts.jsonl without the logs, or tidied by hand."""
    for number in (1, 2):
        append_attempt(
            run,
            AttemptRecord(
                attempt=number,
                invocation=None,
                kind="failed",
                code=70,
                message="it was so",
            ),
        )
    for number in kept:
        (run.path / "logs" / f"attempt-{number:02d}").mkdir(parents=True)

    def stop_when_up() -> None:
        if is_up(run, 3):
            raise KeyboardInterrupt

    with pytest.raises(Preempted):
        train(stop_when_up)
    assert [record.attempt for record in read_attempts(run)] == [1, 2, 3]


def test_an_attempt_with_a_folder_and_no_record_was_killed(run, caplog):
    for number in (2, 4):
        (run.path / "logs" / f"attempt-{number:02d}").mkdir(parents=True)
    write_attempt_plan(run.path / "logs/attempt-04", make_attempt(run.path))
    append_attempt(
        run, AttemptRecord(attempt=2, invocation=None, kind="failed", code=70)
    )
    assert record_killed_attempts(run) == 4
    assert [(record.attempt, record.invocation) for record in read_attempts(run)] == [
        (2, None),
        (4, "mine"),
    ]
    assert [record.args for record in caplog.records] == [(4,)], "which is said once"
    assert record_killed_attempts(run) == 4 and len(read_attempts(run)) == 2
    assert len(caplog.records) == 1


def test_a_launcher_that_is_not_installed_is_on_record(run, train, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    outcome = train(environment={"launcher": "srun"})
    assert outcome.code == 64 and "environment.launcher=srun" in outcome.message
    (record,) = read_attempts(run)
    assert (record.attempt, record.kind, record.code) == (1, "failed", 64)


def test_a_port_in_use_ends_an_attempt_as_a_failed_worker_does(run):
    with socket.create_server(("", 0)) as taken:
        plan = make_plan(nnodes=2, port=taken.getsockname()[1], master_addr="127.0.0.1")
        outcome = run_attempt(
            make_attempt(run.path, plan=plan), LockedRun((), lambda: None)
        )
    assert outcome.code == 70 and str(plan.port) in read_attempts(run)[-1].message
