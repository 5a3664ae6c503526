"""How far intervals in minutes are where an attempt starts."""

import pytest

from infini_llama.tasks.records.metrics import TrainLine, ValidationLine
from infini_llama.tasks.train.planning import since_evaluation


@pytest.mark.parametrize(
    ("validated", "step", "seconds"),
    [((), 5, 10.0), ((3,), 5, 4.0), ((3,), 3, 0.0), ((3, 8), 5, 4.0), ((0,), 2, 4.0)],
)
def test_training_since_the_last_evaluation_that_is_kept(validated, step, seconds):
    lines = [
        TrainLine(step=number, step_time=1.0, save_time=0.5, report_time=0.5)
        for number in range(1, 11)
    ]
    # Of a version that did not measure the report.
    lines[0] = TrainLine(step=1, step_time=2.0)
    lines += [
        ValidationLine(kind="validation", step=number, tokens=1) for number in validated
    ]
    assert since_evaluation(lines, step) == seconds
