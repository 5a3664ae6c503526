"""When the validation loss is measured."""

import time
from types import SimpleNamespace

import pytest

from infini_llama.configs.reading import changed
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.metrics import ValidationLine
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.train.worker.callbacks.callback import Training
from infini_llama.tasks.train.worker.callbacks.evaluation import Evaluation
from support.one_rank import single_rank
from support.records import make_attempt, make_config


@pytest.mark.parametrize(
    ("measured", "steps"), [((), [30]), ((20,), [30]), ((20, 30), [])]
)
def test_a_run_that_resumes_beyond_its_end_is_evaluated_there_once(
    tmp_path, measured, steps
):
    strategy, lines = single_rank(Llama(LlamaConfig(61, 16, 32, 2, 2, 1, 16))), []
    writer = SimpleNamespace(
        has_validation=lambda step: step in measured, validation=lines.append
    )
    validation = SimpleNamespace(
        measure=lambda module, ranks, step, _: ValidationLine(
            step=step, loss=2.0, tokens=24
        )
    )
    heartbeat = SimpleNamespace(beat=lambda *_: None)
    attempt = make_attempt(tmp_path)
    assert attempt.max_steps <= 30
    training = Training(
        attempt, strategy, None, strategy.ranks, heartbeat, lambda: False
    )
    evaluation = Evaluation(training, validation, SimpleNamespace(writer=writer))
    evaluation.on_train_start(TrainState(step=30))
    assert [line.step for line in lines] == steps
    evaluation.on_train_start(TrainState(step=10))
    assert len(lines) == len(steps)


@pytest.mark.parametrize(("seconds", "is_given_up"), [(0.0, True), (5.0, False)])
def test_a_stop_in_the_evaluation_before_the_first_step_gives_it_up_if_its_time_is_not_known(
    tmp_path, seconds, is_given_up
):
    """Else it lasts until the grace period has ended."""
    strategy, lines = single_rank(Llama(LlamaConfig(61, 16, 32, 2, 2, 1, 16))), []
    writer = SimpleNamespace(has_validation=lambda _: False, validation=lines.append)
    validation = SimpleNamespace(
        measure=lambda module, ranks, step, is_over: (
            None if is_over() else ValidationLine(step=step, loss=2.0, tokens=24)
        )
    )
    heartbeat = SimpleNamespace(beat=lambda *_: None)
    config = changed(make_config(), train={"init_from": "a", "warmup_steps": 0})
    attempt = make_attempt(tmp_path, config, evaluation_time=seconds)
    training = Training(
        attempt, strategy, None, strategy.ranks, heartbeat, lambda: True
    )
    evaluation = Evaluation(training, validation, SimpleNamespace(writer=writer))
    state = TrainState()
    evaluation.on_train_start(state)
    assert (state.evaluation_due, not lines) == (is_given_up, is_given_up)


@pytest.mark.parametrize(("is_due", "ends"), [(False, True), (True, False)])
def test_an_evaluation_that_was_given_up_begins_its_interval_anew(
    tmp_path, is_due, ends
):
    """The attempt makes it before any step; the time before it does not count for the next one."""
    strategy = single_rank(Llama(LlamaConfig(61, 16, 32, 2, 2, 1, 16)))
    config = changed(
        make_config(), train={"eval_steps": "1 minutes", "warmup_steps": 0}
    )
    attempt = make_attempt(tmp_path, config, since_evaluation=100.0)
    training = Training(attempt, strategy, None, strategy.ranks, None, lambda: False)
    evaluation = Evaluation(training, None, SimpleNamespace(writer=None))
    evaluation.on_train_start(TrainState(step=5, evaluation_due=is_due))
    assert evaluation.interval.advance(TrainState(step=6)) is ends


def test_the_time_of_an_evaluation_does_not_count_for_the_next_one(
    tmp_path, monkeypatch
):
    """By seconds; else a run whose evaluations take as long as the interval does nothing else."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    strategy = single_rank(Llama(LlamaConfig(61, 16, 32, 2, 2, 1, 16)))
    config = changed(
        make_config(), train={"eval_steps": "1 minutes", "warmup_steps": 0}
    )
    attempt = make_attempt(tmp_path, config)
    training = Training(attempt, strategy, None, strategy.ranks, None, lambda: False)
    evaluation = Evaluation(training, None, SimpleNamespace(writer=None))
    evaluated = list[int]()

    def evaluate(state: TrainState) -> None:
        evaluated.append(state.step)
        now[0] += 59.0

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    evaluation.on_train_start(TrainState())
    for step in range(1, 30):
        now[0] += 7.0
        evaluation.on_step_end(TrainState(step=step), None)
    assert evaluated == [9, 18, 27]
