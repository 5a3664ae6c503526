"""Ends that the training stage itself acts on: a rank that hangs, memory that runs out, numbers that are not finite."""

import json
import math
import os
import shutil
import signal
import struct
import time

import pytest

from infini_llama.tasks.preprocess.tokens.order import rows_of_samples
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import read_attempt_plan
from infini_llama.tasks.storage.artifacts import commit, staging
from support.laboratory import BATCH, SOFTMAX_2, Laboratory, inject
from support.waiting import wait_until


def test_a_hung_rank_is_named_and_the_run_resumes(lab, calm_softmax_2):
    started = lab.start("stopped", *SOFTMAX_2, "runtime.hang_timeout=4")
    lab.wait_for_step("stopped", 23, started)
    # The save of step 20 goes on in the background.
    wait_until(
        (lab.run_dir("stopped") / "checkpoints/step-00000020").is_dir,
        60,
        "step 20 was not saved",
    )
    logs = lab.run_dir("stopped") / "logs"
    status = json.loads((logs / "attempt-01/status-1.json").read_text())
    os.kill(status["pid"], signal.SIGSTOP)
    wait_until(
        lambda: len(list(logs.glob("attempt-*"))) == 2,
        60,
        "the stopped rank was not noticed",
    )
    assert started.wait() == 0, started.log.read_text()
    assert not started.processes()
    first, second = lab.attempts("stopped")
    assert first.code == 76 and "rank 1 " in first.message
    assert second.kind == "done" and second.from_step >= 20
    assert "Current thread" in (logs / "attempt-01/rank-0.log").read_text(), (
        "no stacks were written"
    )
    lab.assert_same("stopped", calm_softmax_2)


def test_text_added_meanwhile_does_not_end_a_run_that_goes_on(tmp_path, server):
    lab, texts = Laboratory.create(tmp_path / "home", server), tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(
            f"the {number}th text of a folder that grows. " * 20
        )
    settings = (
        *SOFTMAX_2,
        "data.source=files",
        f"data.files=[{texts}]",
        "data.tokenizer.vocab_size=300",
        "train.max_steps=24",
    )
    lab.finish("calm", *settings)
    lab.kill_at(12, "grown", *settings)
    (texts / "later.txt").write_text("added before the run went on. " * 200)
    lab.finish("grown", *settings)
    lab.assert_same("grown", "calm")
    killed = lab.attempts("grown")[0]
    assert (killed.code, killed.from_step) == (70, 0), (
        "on record although its command was killed"
    )
    assert lab.start("grown", *settings).wait() == 64, (
        "the text is another one than that of the finished run"
    )


FOR_PEOPLE = """
def change(module):
    def broken(*arguments):
        raise RuntimeError("as if")
    module.sample_texts = broken
    from infini_llama.tasks.train.worker.callbacks import metrics_writer
    metrics_writer.TensorBoard.scalars = broken
"""


def test_what_is_only_for_people_ends_no_training_of_several_ranks(
    lab, calm_softmax_2, tmp_path
):
    broken = inject(
        tmp_path, "infini_llama.tasks.train.worker.callbacks.samples", FOR_PEOPLE
    )
    (tmp_path / "mine.py").write_text(
        "def hook(model, record):\n    raise RuntimeError('as if')\n"
    )
    lab.finish("for-people", *SOFTMAX_2, broken, "train.metrics_hook=mine:hook")
    lab.assert_same("for-people", calm_softmax_2)
    assert len(lab.attempts("for-people")) == 1
    for rank, parts in enumerate(
        (("sampling", "TensorBoard", "metrics_hook"), ("metrics_hook",))
    ):
        text = (
            lab.run_dir("for-people") / f"logs/attempt-01/rank-{rank}.log"
        ).read_text()
        assert text.count("WARNING infini_llama.optional") == len(parts) and all(
            part in text for part in parts
        )


OUT_OF_MEMORY = """
def change(module):
    accumulate = module.NativeStrategy.accumulate
    def tight(strategy, micro_batches, *arguments):
        micro_batches = list(micro_batches)
        if len(micro_batches[0][0]) > 4:
            import torch
            raise torch.OutOfMemoryError("CUDA out of memory (as if)")
        return accumulate(strategy, micro_batches, *arguments)
    module.NativeStrategy.accumulate = tight
"""


SLOW_SAVE = """
def change(module):
    save, calls = module.save_checkpoint, []
    def slow(*arguments):
        calls.append(1)
        if len(calls) > 1:
            import time
            time.sleep(60)
        return save(*arguments)
    module.save_checkpoint = slow
"""


def test_a_second_ctrl_c_ends_at_once_with_a_valid_last_checkpoint(
    lab, calm_softmax_2, tmp_path
):
    slow = inject(tmp_path, "infini_llama.tasks.train.worker.checkpointer", SLOW_SAVE)
    started = lab.start("twice-stopped", *SOFTMAX_2, slow, "runtime.grace_period=100")
    lab.wait_for_step("twice-stopped", 14, started)
    started.process.send_signal(signal.SIGINT)
    wait_until(lambda: "stop requested" in started.log.read_text())
    time.sleep(1.5)  # what comes within a second is the same request
    started.process.send_signal(signal.SIGINT)
    assert started.wait(30) == 75, started.log.read_text()
    text = started.log.read_text()
    assert (
        "second signal received" in text
        and "the newest checkpoint is at step 10" in text
    )
    assert not started.processes()
    lab.finish("twice-stopped", *SOFTMAX_2)
    time_spent = lab.assert_same("twice-stopped", calm_softmax_2)["goodput"]
    parts = sum(
        seconds for part, seconds in time_spent.items() if part not in ("wall", "share")
    )
    assert abs(parts - time_spent["wall"]) < 0.02 * time_spent["wall"]
    assert (
        time_spent["lost_work"] > 0
        and time_spent["down"] > 0
        and time_spent["training"] > 0
    )
    last = json.loads(
        (lab.run_dir("twice-stopped") / "metrics.jsonl").read_text().splitlines()[-2]
    )["goodput"]
    assert abs(last["lost_work"] - time_spent["lost_work"]) < 0.02 * time_spent["wall"]


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_order(
    lab, calm_softmax_2, tmp_path
):
    expected = lab.summary(calm_softmax_2)
    tight = inject(
        tmp_path, "infini_llama.tasks.train.worker.strategies.native", OUT_OF_MEMORY
    )
    summary = lab.finish("tight", *SOFTMAX_2, tight)
    first, second = lab.attempts("tight")
    assert (first.code, second.kind) == (71, "done")
    assert (first.error.phase, first.error.sample_rows) == ("start", None), (
        "found before the first step"
    )
    assert first.error.memory["most_resident"] > 10**7
    assert (
        read_attempt_plan(lab.run_dir("tight") / "logs/attempt-02").micro_batch_size
        == 4
    ), "8 halved"
    assert abs(summary["validation_loss"] - expected["validation_loss"]) < 1e-4, (
        "the same samples in the same order"
    )


NOT_FINITE = """
def change(module):
    bad = set({bad})
    gather = module.TokenReader.gather
    def poisoned(self, rows):
        tokens = gather(self, rows)
        if len(self) == {rows} and bad & set(rows.tolist()):
            tokens[:] = -7  # a sign that the model below turns into a loss that is not finite
        return tokens
    module.TokenReader.gather = poisoned
    from infini_llama.model.llama import Llama
    loss = Llama.loss
    def of_poison(self, inputs, labels, *rest):
        value, count = loss(self, inputs.clamp_min(0), labels.clamp_min(0), *rest)
        return (value * float("nan") if (inputs == -7).any() else value), count
    Llama.loss = of_poison
"""


@pytest.fixture
def not_finite(lab, calm_softmax_2, tmp_path):
    """not_finite(steps): a setting by which the loss of these steps' global batches is not finite, however often they come.

    It is by their first rows, of the table that the undisturbed run was trained on.
    """
    dataset = lab.lineage(calm_softmax_2)["dataset"]
    manifest = (
        lab.home / dataset["path"] / "chunks" / dataset["row_table"] / "manifest.json"
    )
    rows = json.loads(manifest.read_text())["content"]["rows"]["train"]

    def setting(steps: range) -> str:
        first = [rows_of_samples(BATCH * (step - 1), 1, rows, 1234) for step in steps]
        body = NOT_FINITE.format(rows=rows, bad=[int(found[0]) for found in first])
        return inject(tmp_path, "infini_llama.tasks.preprocess.tokens.reader", body)

    return setting


@pytest.mark.slow
def test_non_finite_updates_are_skipped_and_survive_a_kill(lab, not_finite):
    injected = not_finite(range(22, 25))
    expected = lab.finish("poison-calm", *SOFTMAX_2, injected)
    assert expected["updates_left_out"] == 3
    lines = lab.metrics("poison-calm")
    assert [
        line["step"]
        for line in lines
        if line["kind"] == "train" and line["loss"] is None
    ] == [
        22,
        23,
        24,
    ]
    assert (
        "update skipped, rows ["
        in (lab.run_dir("poison-calm") / "logs/attempt-01/rank-0.log").read_text()
    )
    lab.kill_at(34, "poison-killed", *SOFTMAX_2, injected)
    lab.finish("poison-killed", *SOFTMAX_2, injected)
    lab.assert_same("poison-killed", "poison-calm")


def test_too_many_non_finite_updates_roll_back_and_skip_the_samples(lab, not_finite):
    summary = lab.finish(
        "diverges", *SOFTMAX_2, not_finite(range(24, 33)), "train.max_skips=4"
    )
    first, second = lab.attempts("diverges")
    assert (first.code, second.kind, second.from_step) == (72, "done", 20)
    assert lab.lineage("diverges")["skipped_samples"] == [
        {"first": 20 * BATCH, "end": 28 * BATCH}
    ]
    assert summary["updates_left_out"] == 4, (
        "after the window the rest of the bad samples are left out one by one"
    )
    assert summary["steps"] == 60


def poison(checkpoint) -> None:
    """Make a weight NaN, and commit the checkpoint again with valid checksums."""
    staged = staging(checkpoint)
    shutil.copytree(checkpoint, staged, dirs_exist_ok=True)
    (staged / "manifest.json").unlink()
    table = json.loads((staged / "tensors.json").read_text())["tensors"]
    part = next(
        entry
        for name, entry in table.items()
        if "embed" in name and name.startswith("model.")
    )["parts"][0]
    with (staged / part["file"]).open("r+b") as file:
        file.seek(part["start"])
        file.write(struct.pack("<f", float("nan")) * math.prod(part["sizes"]))
    shutil.rmtree(checkpoint)
    content = {"step": checkpoints.step_of(checkpoint)}
    commit(staged, checkpoint, checkpoints.KIND, {}, content=content)


def test_a_checkpoint_of_weights_that_are_not_finite_is_passed_over(lab):
    settings = (*SOFTMAX_2, "train.max_skips=2")
    lab.stop_at(34, "poisoned", *settings)
    newest, older = (
        found.path
        for found in checkpoints.committed(lab.run_dir("poisoned") / "checkpoints")[:2]
    )
    poison(newest)
    summary = lab.finish("poisoned", *settings)
    _, first, again, last = lab.attempts("poisoned")
    assert [first.code, again.code, last.kind] == [72, 72, "done"]
    steps = [checkpoints.step_of(checkpoint) for checkpoint in (newest, newest, older)]
    assert [attempt.from_step for attempt in (first, again, last)] == steps
    (skipped,) = lab.lineage("poisoned")["skipped_samples"]
    assert skipped["first"] == steps[-1] * BATCH and summary["steps"] == 60


NON_FINITE_WEIGHTS = """
def change(module):
    step, calls = module.optimizer_step, []
    def poisoned(strategy, *arguments):
        update = step(strategy, *arguments)
        calls.append(1)
        if len(calls) == 20 and once():
            import torch
            with torch.no_grad():
                next(strategy.model.parameters())[0, 0] = float("inf")
        return update
    module.optimizer_step = poisoned
"""


def test_weights_that_are_not_finite_are_not_saved(lab, tmp_path):
    injected = inject(
        tmp_path, "infini_llama.tasks.train.worker.trainer", NON_FINITE_WEIGHTS
    )
    summary = lab.finish(
        "not-saved", "model.attention=softmax", "environment.nproc_per_node=1", injected
    )
    first, second = lab.attempts("not-saved")
    assert (first.code, first.checkpoint_step) == (72, 10)
    assert (second.kind, second.from_step, summary["steps"]) == ("done", 10, 60)


@pytest.mark.slow
def test_divergence_without_end_stops_with_a_sentence(lab, not_finite):
    bad = not_finite(range(1, 200))
    started = lab.start(
        "hopeless", *SOFTMAX_2, bad, "train.max_skips=2", "runtime.max_rollbacks=1"
    )
    assert started.wait() == 72, started.log.read_text()
    assert (
        "were skipped" in started.log.read_text()
        and "train.learning_rate" in started.log.read_text()
    )
    assert not started.processes()
