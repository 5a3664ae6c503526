"""What people see: plain lines without a terminal, throttled; the closing summary."""

import logging
import math

import pytest

from infini_llama.configs.reading import changed
from infini_llama.flows.cli import console
from infini_llama.tasks.progress import Reached
from infini_llama.tasks.records.summary import RunSummary


@pytest.fixture
def log(monkeypatch):
    """The train stage's logger with a plain console whose clock the test moves."""
    clock = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    with console.shown_log(quiet=False, verbose=False):
        yield logging.getLogger("infini_llama.train"), clock


def progress(done, total=10):
    return {"progress": Reached(done, total, "MB")}


def test_plain_lines(log, capsys):
    logger, _ = log
    logger.info("attempt 1 [starts]")
    logger.warning("checkpoint is damaged")
    logger.debug("not shown")
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "train       attempt 1 [starts]",
        "train       warning: checkpoint is damaged",
    ]
    assert out == ""


def test_progress_is_throttled_but_its_end_is_shown(log, capsys):
    logger, clock = log
    for done in range(11):
        logger.info("tokenizing", extra=progress(done))
        clock[0] += 0.5
    assert capsys.readouterr().err.splitlines() == [
        "train       tokenizing  4/10 MB",
        "train       tokenizing  8/10 MB",
        "train       tokenizing  10/10 MB",
    ]


def test_a_message_with_its_own_progress_is_unchanged(log, capsys):
    log[0].info("step 10/10  loss 1.0", extra=progress(10))
    assert capsys.readouterr().err == "train       step 10/10  loss 1.0\n"


def test_quiet_shows_warnings_only(capsys):
    logger = logging.getLogger("infini_llama.train")
    with console.shown_log(quiet=True, verbose=False):
        logger.info("step 10/10", extra=progress(10))
        logger.warning("so")
    assert capsys.readouterr().err == "train       warning: so\n"


def test_summary():
    # Fmt: skip.
    fields = {
        "run": "tiny",
        "steps": 300,
        "tokens": 1_228_800,
        "input_tokens": 1_228_800,
        "tokens_per_second": 12_345.6,
        "validation_loss": 3.0,
        "validation_bits_per_token": 4.328,
        "unigram_entropy_bits": 9.2,
        "bits_per_byte": 1.2,
        "checkpoint": "/c",
        "paths": {"run": "/x", "tensorboard": "/t", "report": "/r", "loss_curve": "/l"},
        "samples": ["def f():\n    [pass]"],
        "parameters": 9,
        "weights_sha256": "a",
        "optimizer_sha256": "b",
        "checkpoint_digest": "c",
        "train_loss": 3.1,
        "best_validation_loss": 3.0,
        "seconds": 99.0,
        "updates_left_out": 0,
        "steps_without_targets": 0,
        "attempts": 1,
        "goodput": {},
    }
    summary = RunSummary.model_validate(fields)
    text = console.summary_text(summary)
    for words in (
        "1,228,800 tokens",
        "12,346 tokens/s",
        "3.0000 nats per token",
        "3.38 below the unigram entropy of 6.3770",
        "1.200 bits per byte",
        "/c",
        "/r",
        "/l",
    ):
        assert words in text
    answers = console.summary_text(changed(summary, tokens=300))
    assert "1,228,800 tokens read, of which 300 are targets" in answers
    assert text.endswith("sample\ndef f():\n    [pass]")
    assert "3.00 ABOVE the unigram entropy" in console.summary_text(
        changed(summary, unigram_entropy_bits=0.0)
    )
    assert "3.0000 nats per token\n" in console.summary_text(
        changed(summary, unigram_entropy_bits=None)
    )
    unmeasured = changed(
        summary,
        validation_loss=None,
        validation_bits_per_token=None,
        bits_per_byte=None,
    )
    assert "not finite" in console.summary_text(unmeasured)


def test_losses_as_a_sparkline():
    assert console.sparkline([]) == "" and console.sparkline([3.0, 3.0]) == "▁▁"
    assert console.sparkline([8.0, 4.0, 1.0]) == "█▄▁"


def test_a_bar_shows_the_loss_of_the_whole_run_and_the_newest_checkpoint():
    handler = console.BarHandler(logging.INFO)
    try:
        for step in range(1, 1001):
            handler.emit(
                record(f"step {step}", progress=Reached(step, 1000, "", loss=-step))
            )
            if step == 600:
                handler.emit(record("checkpoint committed at step 600", checkpoint=600))
        shown = handler.progress.tasks[0].description
        assert (
            len(handler.losses)
            == console.SPARKS
            == sum(map(shown.count, console.BLOCKS))
        )
        assert "█" in shown.split("▁")[0] and shown.endswith("saved at 600")
        handler.emit(record("step", progress=Reached(1000, 1000, "", loss=math.nan)))
    finally:
        handler.close()


def test_a_finished_bar_becomes_a_line_when_other_records_follow(capsys):
    handler = console.BarHandler(logging.INFO)
    try:
        for done in (1, 2):
            handler.emit(record("checking", progress=Reached(done, 2, "files")))
        assert len(handler.progress.tasks) == 1
        handler.emit(record("checkpoint committed at step 600", checkpoint=600))
        assert not handler.progress.tasks and not handler.bars
    finally:
        handler.close()
    finished, later = capsys.readouterr().err.split("checkpoint committed")
    assert "checking  2/2 files" in finished.splitlines()[-2] and "2/2" not in later


@pytest.mark.parametrize("columns", [80, 140])
def test_a_narrow_terminal_keeps_the_times_whole(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    handler = console.BarHandler(logging.INFO)
    try:
        words = "step 14/150  loss 7.3314  1,352 tokens/s  MFU 11.1%"
        for _ in range(2):
            handler.emit(record(words, progress=Reached(14, 150, "", loss=7.3)))
        with handler.progress.console.capture() as shown:
            handler.progress.console.print(handler.progress.get_renderable())
    finally:
        handler.close()
    (line,) = shown.get().splitlines()
    assert (
        len(line) <= columns
        and line.startswith("train ")
        and "step 14/150  loss 7.3314" in line
    )
    assert ("━" in line) == (columns > 100)
    assert line.count(":") == 4, "hours, minutes and seconds passed, and to go"


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord(
        "infini_llama.train", logging.INFO, "", 0, message, (), None
    )
    made.__dict__ |= extra
    return made


def test_slow_work_has_a_line_at_its_first_report(log, capsys):
    logger, clock = log
    logger.info("attempt 1 starts")
    clock[0] += 300
    logger.info("step 10/100", extra=progress(10, 100))
    assert "step 10/100" in capsys.readouterr().err
