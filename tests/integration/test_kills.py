"""Killed at a random moment, the same command finishes with the weights of the run that nobody disturbed, to the bit."""

import os
import random
import signal
import time
from itertools import product

import pytest

from support.laboratory import BATCH, SOFTMAX_2, kill, workers_of

# what is killed × attention × workers; the whole product is behind `-m slow` (docs/testing.md)
# test_flow.py kills the flow.
SHORT = {
    ("torchrun", "infini", 2),
    ("save", "infini", 2),
}
CELLS = list(
    product(("worker", "torchrun", "flow", "save"), ("softmax", "infini"), (1, 2))
)
MARKED = [
    pytest.param(
        *cell,
        marks=[] if cell in SHORT else pytest.mark.slow,
        id="-".join(map(str, cell)),
    )
    for cell in CELLS
]


def torchrun_of(started) -> int:
    return next(
        pid
        for pid, command in sorted(started.processes().items())
        if "tasks.train.torchrun" in command
    )


def strike(victim: str, lab, name: str, started, rng: random.Random) -> None:
    """Kills the victim at a moment drawn by `rng`."""
    lab.wait_for_step(name, rng.randint(3, 35), started)
    if victim == "save":  # everything at once, in the middle of a checkpoint's write
        checkpoints = lab.run_dir(name) / "checkpoints"
        while not any(checkpoints.glob(".step-*")):
            assert started.process.poll() is None, "no save was caught"
        time.sleep(rng.uniform(0, 0.02))
        for pid in [started.process.pid, *started.processes()]:
            try:
                kill(pid)
            except ProcessLookupError:
                continue
        return
    time.sleep(rng.uniform(0, 0.1))
    if victim == "flow":
        kill(started.process.pid)
    elif victim == "torchrun":
        kill(torchrun_of(started))
    else:
        kill(rng.choice(workers_of(started.marker)))


@pytest.mark.parametrize(("victim", "attention", "workers"), MARKED)
def test_killed_and_run_again_is_bitwise_the_uninterrupted_run(
    victim, attention, workers, lab, uninterrupted
):
    calm = uninterrupted(attention, workers)
    name = f"{victim}-{attention}-{workers}"
    rng = random.Random(name)
    overrides = (
        f"model.attention={attention}",
        f"environment.nproc_per_node={workers}",
    )
    # One of them is resumed twice.
    kills = 2 if (victim, attention, workers) == ("flow", "softmax", 1) else 1
    for _ in range(kills):
        started = lab.start(name, *overrides, executed=victim == "torchrun")
        strike(victim, lab, name, started, rng)
        code = started.wait()
        if victim in ("worker", "torchrun"):  # the command itself carries on
            assert code == 0, started.log.read_text()
            assert not started.processes()
    lab.finish(name, *overrides)
    attempts = lab.assert_same(name, calm)["attempts"]
    assert attempts == kills + 1, (
        "not every kill interrupted something: the test proved nothing"
    )


def test_sigterm_saves_and_the_same_command_resumes(lab, calm_softmax_2):
    lab.stop_at(13, "sigterm", *SOFTMAX_2)
    attempt = lab.attempts("sigterm")[-1]
    assert attempt.kind == "preempted"
    assert attempt.checkpoint_step == attempt.step, "it saved where it stood"
    lab.finish("sigterm", *SOFTMAX_2)
    lab.assert_same("sigterm", calm_softmax_2)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_a_time_limit_that_reaches_torchrun_and_its_ranks_saves_first(
    number, lab, calm_softmax_2
):
    """Schedulers may signal every process of a job."""
    name = f"limited-{number.name}"
    started = lab.start(name, *SOFTMAX_2)
    lab.wait_for_step(name, 13, started)
    for pid in [torchrun_of(started), *workers_of(started.marker)]:
        os.kill(pid, number)
    assert started.wait() == 0, started.log.read_text()
    stopped, resumed = lab.attempts(name)
    assert stopped.kind == "preempted"
    assert stopped.checkpoint_step == stopped.step == resumed.from_step >= 13
    lab.assert_same(name, calm_softmax_2)


@pytest.mark.slow
def test_packed_rows_resume_bitwise_and_their_targets_are_counted(lab):
    overrides = (
        "data.packing=best_fit",
        "train.document_masking=true",
        "environment.nproc_per_node=2",
    )
    lab.finish("packed-calm", *overrides)
    overrides += ("train.dataloader_num_workers=2",)
    started = lab.start("packed-killed", *overrides)
    lab.wait_for_step("packed-killed", 25, started)
    kill(torchrun_of(started))
    assert started.wait() == 0, started.log.read_text()
    lab.assert_same("packed-killed", "packed-calm")
    tokens = [
        record["tokens"]
        for record in lab.metrics("packed-calm")
        if record["kind"] == "train"
    ]
    steps = [
        after - before for before, after in zip([0, *tokens], tokens, strict=False)
    ]
    assert all(0 < step <= BATCH * 32 for step in steps) and len(set(steps)) > 1


ANSWERS = (
    "data.source=passkey",
    "data.passkey.documents=400",
    "data.passkey.repetitions=1",
    "data.loss_on=answer",
    "data.answer_after=What is the pass key? The pass key is",
    "data.packing=padded",
    "data.sequence_length=128",
    "data.tokenizer.vocab_size=320",
    "model.attention=infini",
    "model.segment_length=32",
    "model.memory_write_jitter=32",
    "train.max_steps=30",
    "environment.nproc_per_node=1",
)


@pytest.mark.slow
def test_killed_with_the_loss_on_answers_alone_resumes_bitwise(lab):
    calm = lab.finish("answers-calm", *ANSWERS)
    lab.kill_at(13, "answers", *ANSWERS)  # past the first checkpoint
    lab.finish("answers", *ANSWERS)
    assert lab.assert_same("answers", "answers-calm")["attempts"] == 2
    lines = lab.metrics("answers-calm")
    targets = [line["tokens"] for line in lines if line["kind"] == "train"]
    # A number of five digits, not the 128 tokens of a row.
    assert targets[0] < BATCH * 10 and calm["steps"] == 30
    assert any(
        line.get("memory_reads") for line in lines if line["kind"] == "validation"
    )
