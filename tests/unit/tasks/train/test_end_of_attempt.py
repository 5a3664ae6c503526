"""How an attempt ended, where the ranks say one thing and the watch over them another."""

import pytest

from infini_llama.configs.errors import ExitCode
from infini_llama.tasks.runs.status import Outcome
from infini_llama.tasks.train.attempt import Watched, decide

DONE = Outcome("done", ExitCode.FINISHED, "finished", 8)
SAVED = Outcome("preempted", ExitCode.PREEMPTED, "saved", 5)
REFUSED = Outcome("failed", ExitCode.INVALID_CONFIG, "rank 0", 3, culprit=0)
SILENT = Outcome("failed", ExitCode.UNEXPECTED, "rank 1 ended without an error report")


@pytest.mark.parametrize(
    ("reported", "watched", "code"),
    [
        (DONE, Watched(1, hang="torchrun has not ended"), ExitCode.FINISHED),
        (DONE, Watched(1, fault=OSError()), ExitCode.FINISHED),
        (SAVED, Watched(1, hang="torchrun has not ended"), ExitCode.PREEMPTED),
        (SAVED, Watched(1, stop_request=KeyboardInterrupt()), ExitCode.PREEMPTED),
        (SAVED, Watched(1, fault=OSError()), ExitCode.UNEXPECTED),
        (REFUSED, Watched(1, hang="rank 1"), ExitCode.INVALID_CONFIG),
        (REFUSED, Watched(1, stop_request=KeyboardInterrupt()), ExitCode.INVALID_CONFIG),
        (SILENT, Watched(1, hang="rank 1"), ExitCode.HUNG),
        (SILENT, Watched(-9), ExitCode.UNEXPECTED),
        (SILENT, Watched(1, stop_request=KeyboardInterrupt()), ExitCode.PREEMPTED),
    ],
)
def test_what_is_known_best_decides(reported, watched, code):
    assert decide(reported, watched).code == code
