"""What is finished is saved before anything that is only for people, and a stop loses no finished step."""

import json
import signal
import time

import pytest

from infini_llama.tasks.records.metrics import ValidationLine
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_reader import RunReader
from support.laboratory import Laboratory, Started, inject
from support.waiting import wait_until

SETTINGS = (
    "model.attention=softmax",
    "train.max_steps=24",
    "train.eval_steps=8",
    "train.save_steps=1000",
)
TWO_RANKS = (*SETTINGS, "environment.nproc_per_node=2")

SLOW_TEXTS = """
def change(module):
    import time
    take = module.Writer._take
    def slow(*arguments):
        time.sleep(0.2)
        take(*arguments)
        return False
    module.Writer._take = slow
"""
SLOW_EVALUATION = """
def change(module):
    import time
    batch = module.to_batch
    def slow(*arguments):
        time.sleep(0.3)
        return batch(*arguments)
    module.to_batch = slow
"""
EVALUATION = "infini_llama.tasks.train.worker.callbacks.evaluation"
GENERATION = "infini_llama.tasks.runs.generation"
LONG_EVALUATION = "train.eval_tokens=12000"  # 47 forward passes of 8 sequences


@pytest.fixture(scope="module")
def calm(lab) -> str:
    lab.finish("calm-saved-first", *TWO_RANKS)
    return "calm-saved-first"


def checkpoint_steps(lab: Laboratory, name: str) -> list[int]:
    return [
        found.step for found in checkpoints.committed(lab.run_dir(name) / "checkpoints")
    ]


def wait_for_phase(
    lab: Laboratory, name: str, phase: str, step: int, started: Started
) -> None:
    """Wait until the first rank of the newest attempt is in `phase` after `step` steps."""

    def is_there() -> bool:
        assert started.process.poll() is None, started.log.read_text()
        newest = sorted((lab.run_dir(name) / "logs").glob("attempt-*"))[-1:]
        files = [folder / "heartbeat-0" for folder in newest]
        return any(
            file.exists() and file.read_text().split()[:2] == [str(step), phase]
            for file in files
        )

    wait_until(is_there, 120, f"{name} was never in {phase} after step {step}")


def stop(started: Started, seconds: float) -> str:
    """Request a stop; the command must end by itself within `seconds`. Returns its output."""
    started.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code = started.wait()
    took = time.monotonic() - began
    text = started.log.read_text()
    assert code == 75, text
    assert took < seconds, f"{took:.1f} s:\n{text}"
    assert not started.processes()
    return text


def test_a_stop_while_texts_are_written_keeps_the_step(lab, calm, tmp_path, caplog):
    slow = inject(tmp_path, GENERATION, SLOW_TEXTS)
    settings = (*TWO_RANKS, "train.sample_tokens=200")
    started = lab.start("texts", *settings, slow)
    wait_until(lambda: "validation loss" in started.log.read_text(), 120)
    wait_for_phase(lab, "texts", "samples", 8, started)
    wait_until(
        lambda: checkpoint_steps(lab, "texts") == [8], 3, "texts were written before"
    )
    text = stop(started, 10)
    assert "the newest checkpoint is at step 8" in text
    assert checkpoint_steps(lab, "texts") == [8], "no other step was begun"
    lab.finish("texts", *settings)
    lab.assert_same("texts", calm)
    assert lab.attempts("texts")[1].from_step == 8
    reader = RunReader(lab.run_dir("texts"))
    assert {line.step for line in reader.samples} == {16, 24}
    assert "samples.jsonl" not in caplog.text, "texts that were given up are no damage"
    lines = (lab.run_dir("texts") / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [8, 16]
    assert reader.goodput.samples > 0


def test_a_stop_where_no_save_is_due_saves_without_another_step(lab, calm, tmp_path):
    """The second evaluation is no better, so nothing is saved until the stop."""
    worse = """
def change(module):
    measure = module.ValidationSet.measure
    def worse(self, module_, ranks, step, *rest):
        line = measure(self, module_, ranks, step, *rest)
        return line.model_copy(update={"loss": float(step)})
    module.ValidationSet.measure = worse
"""
    both = inject(tmp_path, GENERATION, SLOW_TEXTS)
    (tmp_path / "sitecustomize.py").rename(tmp_path / "slow_texts.py")
    both = inject(tmp_path, EVALUATION, worse)
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write("\nimport slow_texts\n")
    started = lab.start("unsaved", *TWO_RANKS, both, "train.sample_tokens=15")
    wait_for_phase(lab, "unsaved", "samples", 16, started)
    stop(started, 10)
    assert checkpoint_steps(lab, "unsaved") == [16, 8]


def test_a_stop_in_the_first_evaluation_gives_it_up_until_the_next_attempt(
    lab, tmp_path
):
    settings = (*TWO_RANKS, LONG_EVALUATION)
    lab.finish("calm-evaluated", *settings)
    slow = inject(tmp_path, EVALUATION, SLOW_EVALUATION)
    started = lab.start("evaluated", *settings, slow)
    wait_for_phase(lab, "evaluated", "evaluate", 8, started)
    stop(started, 8)
    (saved,) = checkpoints.committed(lab.run_dir("evaluated") / "checkpoints")
    state = checkpoints.read_state(saved.path)
    assert (saved.step, saved.validation_loss, state.evaluation_due) == (8, None, True)
    lab.finish("evaluated", *settings)
    lab.assert_same("evaluated", "calm-evaluated")
    for name in ("calm-evaluated", "evaluated"):
        kept = checkpoints.committed(lab.run_dir(name) / "checkpoints")
        assert [(found.step, found.validation_loss is None) for found in kept] == [
            (24, False),
            (16, False),
            (8, False),
        ]
        assert not checkpoints.read_state(kept[-1].path).evaluation_due


def test_a_stop_in_the_last_evaluation_leaves_a_run_that_the_same_command_finishes(
    lab, tmp_path
):
    settings = (*TWO_RANKS, LONG_EVALUATION, "train.eval_steps=100")
    lab.finish("calm-last", *settings)
    slow = inject(tmp_path, EVALUATION, SLOW_EVALUATION)
    started = lab.start("last", *settings, slow)
    wait_for_phase(lab, "last", "evaluate", 24, started)
    stop(started, 8)
    assert not (lab.run_dir("last") / "result.json").exists()
    lab.finish("last", *settings)
    lab.assert_same("last", "calm-last")
    results = [
        json.loads((lab.run_dir(name) / "result.json").read_text())
        for name in ("last", "calm-last")
    ]
    assert results[0]["checkpoint_digest"] == results[1]["checkpoint_digest"]
    assert results[0]["samples"] == results[1]["samples"] != []


def test_a_measured_evaluation_runs_to_its_end(lab, tmp_path):
    slow = inject(tmp_path, EVALUATION, SLOW_EVALUATION)
    settings = (*TWO_RANKS, "train.eval_tokens=4000", "train.eval_steps=4")
    started = lab.start("measured", *settings, slow)
    wait_for_phase(lab, "measured", "evaluate", 8, started)
    stop(started, 30)
    validated = RunReader(lab.run_dir("measured")).validated
    assert [line.step for line in validated if isinstance(line, ValidationLine)] == [
        4,
        8,
    ]
    newest = checkpoints.committed(lab.run_dir("measured") / "checkpoints")[0]
    assert newest.step == 8 and newest.validation_loss is not None
