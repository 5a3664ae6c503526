"""Who is tried again, how often, and after how long."""

import pytest

from infini_llama.configs.errors import (
    ConfigError,
    DataError,
    PipelineError,
    Preempted,
    TrainFailed,
)
from infini_llama.configs.schema import RuntimeConfig
from infini_llama.tasks.runs.run_folder import RunFolder, is_retried
from infini_llama.tasks.storage.locks import Busy
from infini_llama.tasks.train.outcome import Outcome, error_of
from infini_llama.tasks.train.retries import LONGEST_DELAY, Retries, retries_for


def policy(limit=3, first_delay=5.0, steps=(0,)):
    """A policy that sees the newest checkpoint at these steps, one after the other, the last one for ever."""
    remaining = list(steps)
    return Retries(
        limit,
        first_delay,
        lambda: remaining.pop(0) if len(remaining) > 1 else remaining[0],
    )


@pytest.mark.parametrize(
    ("error", "delay"),
    [
        (ConfigError("x"), None),
        (DataError("x"), None),
        (Preempted("x"), None),
        (PipelineError("lock held"), None),
        (KeyboardInterrupt(), None),
        (SystemExit(1), None),
        (ValueError("unexpected"), 5.0),
        (OSError(5, "I/O error"), 5.0),
    ],
)
def test_defects_and_faults_of_the_machine_are_retried(error, delay):
    assert policy().delay_after(error) == delay


@pytest.mark.parametrize(
    ("code", "delay"),
    [(64, None), (65, None), (70, 5.0), (71, None), (72, None), (75, 5.0), (76, 5.0)],
)
def test_an_attempt_that_failed_or_hung_is_retried_and_no_other(code, delay):
    error = error_of(Outcome("failed", code, "x"))
    assert error.exit_code == code and policy().delay_after(error) == delay


def test_delays_double_until_the_budget_at_one_step_is_spent():
    retries = policy(limit=3)
    assert [retries.delay_after(TrainFailed("x")) for _ in range(5)] == [
        5.0,
        10.0,
        20.0,
        None,
        None,
    ]


def test_an_older_checkpoint_does_not_renew_the_budget():
    retries = policy(limit=1, steps=(200, 100, 150))
    assert [retries.delay_after(TrainFailed("x")) for _ in range(3)] == [5.0, None, 5.0]


def test_a_newer_checkpoint_renews_the_budget_and_the_delay():
    retries = policy(limit=1, steps=(0, 100, 200, 200))
    assert [retries.delay_after(TrainFailed("x")) for _ in range(4)] == [
        5.0,
        5.0,
        5.0,
        None,
    ]


def test_the_newest_attempt_is_marked_once_the_budget_is_spent(tmp_path):
    runtime = RuntimeConfig(home=tmp_path, name="mine", retries=1)
    run, retries = RunFolder.of(runtime), retries_for(runtime)
    (run.path / "logs" / "attempt-01").mkdir(parents=True)
    with pytest.raises(TrainFailed), retries.until_end():
        assert retries.delay_after(TrainFailed("x")) is not None and is_retried(run)
        assert retries.delay_after(TrainFailed("x")) is None
        raise TrainFailed("x")
    assert not is_retried(run)
    (run.path / "logs" / "attempt-02").mkdir()
    assert is_retried(run)


def test_the_newest_attempt_is_marked_where_a_delay_is_broken_off(tmp_path):
    runtime = RuntimeConfig(home=tmp_path, name="mine")
    run, retries = RunFolder.of(runtime), retries_for(runtime)
    (run.path / "logs" / "attempt-01").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), retries.until_end():
        raise KeyboardInterrupt  # while it waits for another command's lock, whose attempt this is
    assert is_retried(run)
    with pytest.raises(Busy), retries.until_end():
        retries.delay_after(TrainFailed("x"))
        raise Busy("another command has made the newest attempt meanwhile")
    assert is_retried(run)
    with pytest.raises(KeyboardInterrupt), retries.until_end():
        raise KeyboardInterrupt
    assert not is_retried(run)


def test_the_delay_is_bounded_by_default():
    retries = policy(limit=100)
    assert (
        max(retries.delay_after(TrainFailed("x")) or 0 for _ in range(100))
        == LONGEST_DELAY
    )
    assert (
        policy(first_delay=2 * LONGEST_DELAY).delay_after(TrainFailed("x"))
        == 2 * LONGEST_DELAY
    )
