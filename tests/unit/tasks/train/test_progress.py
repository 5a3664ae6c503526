"""Progress that is logged while workers write metrics.jsonl."""

import json
import logging

import pytest

from infini_llama.flows.cli import console
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.train.progress import Progress


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def write(run):
    """write(*steps, seconds): a line of metrics.jsonl per step."""

    def write(*steps, seconds):
        with run.metrics.open("a") as file:
            for step in steps:
                line = {
                    "kind": "train",
                    "step": step,
                    "loss": 2.0,
                    "learning_rate": 3e-5,
                    "tokens_per_second": 10.0,
                    "step_time": seconds,
                }
                file.write(json.dumps(line) + "\n")

    return write


@pytest.fixture
def messages(caplog):
    """messages(): what was logged."""
    caplog.set_level(logging.INFO, logger="infini_llama.train")
    return lambda: [record.getMessage() for record in caplog.records]


def test_the_second_step_logs_the_expected_duration(run, write, messages):
    progress = Progress(run, run.path, max_steps=721, logging_steps=100)
    write(1, seconds=900)
    progress.poll()
    assert messages() == []
    for step in (2, 3):
        write(step, seconds=10)
        progress.poll()
    assert messages() == ["1 h 59 min remaining at the speed of step 2"]


def test_a_resumed_run_reports_what_remains(run, write, messages):
    write(*range(1, 51), seconds=10)
    progress = Progress(run, run.path, max_steps=100, logging_steps=100)
    write(51, 52, seconds=10)
    progress.poll()
    assert messages() == ["8 min remaining at the speed of step 52"]


def test_a_short_run_needs_no_announcement(run, write, messages):
    progress = Progress(run, run.path, max_steps=20, logging_steps=100)
    write(*range(1, 20), seconds=0.1)
    progress.poll()
    assert messages() == []


def test_a_checkpoint_that_was_moved_aside_is_not_announced(run, messages):
    run.checkpoints.mkdir()
    (run.checkpoints / "step-00000016.damaged-1").mkdir()
    Progress(run, run.path, 16, 1).poll()
    assert messages() == []


def test_each_logged_step_has_loss_learning_rate_and_throughput(run, write, capsys):
    with console.shown_log(quiet=False, verbose=False):
        progress = Progress(run, run.path, max_steps=22, logging_steps=5)
        write(*range(1, 23), seconds=0.001)
        progress.poll()
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert [line[2] for line in lines] == ["5/22", "10/22", "15/22", "20/22", "22/22"]
    assert all(line[3:8] == ["loss", "2.0000", "lr", "3e-05", "10"] for line in lines)


def test_a_warning_of_rank_0_is_logged_as_one(run, messages, caplog):
    progress = Progress(run, run.path, max_steps=20, logging_steps=100)
    progress.poll()  # before the rank has a log
    log = run.path / "rank-0.log"
    head = "2026-01-01 00:00:00,000"
    log.write_bytes(
        f"{head} INFO infini_llama.worker: fine\n{head} WARNING torch.other: not ours\nUserWarning: nor this\n"
        f"{head} WARNING infini_llama.worker: train.compile=block is turned off\n{head} WARNING infini_llama.wor".encode()
    )
    progress.poll()
    with log.open("ab") as file:
        file.write(b"ker: gates \xff\n")
    progress.poll()
    assert messages() == ["train.compile=block is turned off", "gates \ufffd"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_warning_of_another_rank_is_logged_and_equal_ones_once(run, messages):
    progress = Progress(run, run.path, max_steps=20, logging_steps=100, ranks=3)
    head = "2026-01-01 00:00:00,000 WARNING infini_llama.worker:"
    for rank, own in enumerate(("", "", f"{head} the profile failed\n")):
        (run.path / f"rank-{rank}.log").write_text(
            f"{head} train.compile=block is turned off\n{own}"
        )
    progress.poll()
    progress.poll()
    assert messages() == ["train.compile=block is turned off", "the profile failed"]
