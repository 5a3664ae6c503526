"""Intervals in minutes over several attempts, and in tokens where few tokens are targets."""

import random
from pathlib import Path

import pytest

from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_reader import RunReader
from support.laboratory import Laboratory, kill, on_the_path
from support.waiting import wait_until

SETTINGS = (
    "model.attention=softmax",
    "environment.nproc_per_node=1",
    "train.max_steps=1000",
    "train.logging_steps=1",
    "train.report_to=[]",
    "train.sample_prompts=[]",
)
STEP_SECONDS = 0.3


@pytest.fixture
def slow_steps(tmp_path) -> tuple[str, ...]:
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def hook(model, record):\n"
        f"    time.sleep({STEP_SECONDS})\n"
        "    return {'one': 1.0}\n"
    )
    return on_the_path(tmp_path), "train.metrics_hook=mine:hook"


def test_an_evaluation_in_minutes_counts_over_attempts(lab, slow_steps):
    """Each of three attempts lasts about a third of the interval longer than none."""
    settings = (
        *SETTINGS,
        *slow_steps,
        "train.eval_steps=0.12 minutes",
        "train.save_steps=1000",
    )
    for last in (10, 20, 36):
        lab.stop_at(last, "evaluated-late", *settings)
    reader = RunReader(lab.run_dir("evaluated-late"))
    first = reader.validated[0].step
    assert first <= 7.2 / STEP_SECONDS + 1
    seconds = sum(line.step_time + line.report_time for line in reader.trained[:first])
    assert seconds <= 7.2 + 2, "counted over the attempts"
    assert first > 10


def test_a_save_in_minutes_counts_the_time_of_lost_attempts(lab, slow_steps):
    settings = (
        *SETTINGS,
        *slow_steps,
        "train.save_steps=0.1 minutes",
        "train.eval_steps=1000",
    )
    folder = lab.run_dir("saved-late") / "checkpoints"
    for number in (1, 2, 3):
        started = lab.start("saved-late", *settings)
        heartbeat = lab.run_dir("saved-late") / f"logs/attempt-{number:02d}/heartbeat-0"
        until = checkpoints.latest_step(folder) + 10
        wait_until(lambda file=heartbeat, step=until: step_in(file) >= step)
        for pid in [started.process.pid, *started.processes()]:
            kill(pid)
        started.wait()
    assert checkpoints.latest_step(folder) > 0


def step_in(heartbeat: Path) -> int:
    return int(heartbeat.read_text().split()[0]) if heartbeat.exists() else 0


def write_questions(folder: Path) -> None:
    folder.mkdir()
    rng = random.Random(3)
    words = ["ka", "lomi", "tervun", "saple", "dro"]
    for number in range(80):
        question = " ".join(rng.choice(words) for _ in range(25))
        (folder / f"{number}.txt").write_text(f"{question} => {rng.choice(words)}")


def test_an_interval_in_tokens_counts_targets_and_says_so_where_they_are_few(
    tmp_path, server
):
    lab = Laboratory.create(tmp_path / "home", server)
    write_questions(tmp_path / "text")
    started = lab.start(
        "answers",
        "data.source=files",
        f"data.files=[{tmp_path}/text/*.txt]",
        "data.sequence_length=64",
        "data.packing=padded",
        "data.loss_on=answer",
        "data.answer_after=' =>'",
        "data.tokenizer.vocab_size=300",
        "train.save_steps=1k tokens",
        "train.eval_steps=100",
        "train.max_steps=24",
        "train.micro_batch_size=8",
        "environment.nproc_per_node=2",
        "model.attention=softmax",
    )
    assert started.wait() == 0, started.log.read_text()
    text = started.log.read_text()
    assert (
        text.count("train.save_steps=1k tokens: tokens are targets, and only") == 1
    ), text
    reader = RunReader(lab.run_dir("answers"))
    assert reader.results.tokens < 1000 < reader.results.input_tokens
    assert [found.step for found in reader.committed] == [24], "targets are counted"
