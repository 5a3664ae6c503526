"""How an attempt ended: by the ranks' statuses, also without any, and where the watch over them says another thing."""

import pytest

from infini_llama.configs.errors import (
    ENDINGS,
    DataError,
    ExitCode,
    Preempted,
    error_message,
)
from infini_llama.tasks.records.status import RankError, RankStatus
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.train.attempt import exception_of
from infini_llama.tasks.train.outcome import Evidence, Outcome, outcome_of


def reported(returncode: int, *statuses: RankStatus | None) -> Outcome:
    return outcome_of(Evidence(returncode, statuses, "logs"))


def word(
    rank,
    state,
    code=0,
    step=5,
    time=1.0,
    message=None,
    kind="RuntimeError",
    peer_lost=False,
):
    error = (
        RankError(type=kind, message=message, peer_lost=peer_lost) if message else None
    )
    place = {"pid": 1, "node": 0, "host": "here", "machine": "here"}
    return RankStatus(
        rank=rank, state=state, code=code, step=step, time=time, error=error, **place
    )


def test_all_preempted_carries_the_step_despite_torchruns_code():
    outcome = reported(1, word(0, "preempted", 75, 7), word(1, "preempted", 75, 7))
    assert (outcome.kind, outcome.code, outcome.step) == ("preempted", 75, 7)


def test_the_first_rank_that_failed_by_itself_is_the_cause():
    lost = word(
        0, "failed", 70, time=1.0, message="Connection closed by peer", peer_lost=True
    )
    cause = word(
        1, "failed", 65, time=2.0, message="shard is damaged", kind="DataError"
    )
    outcome = reported(1, lost, cause)
    assert (
        (outcome.code, outcome.culprit) == (65, 1)
        and "rank 1" in outcome.message
        and "shard is damaged" in outcome.message
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DataError("result.json is a folder."), "result.json is a folder."),
        (KeyError("weight"), "KeyError: 'weight'"),
    ],
)
def test_only_an_error_of_another_program_has_its_kind_in_its_words(error, words):
    assert error_message(error) == words


def test_a_killed_rank_is_named_and_not_the_peer_that_lost_it():
    lost = word(
        0,
        "failed",
        70,
        message="Connection closed by peer [127.0.0.1]:1",
        peer_lost=True,
    )
    outcome = reported(1, lost, word(1, "running", 70))
    assert outcome.culprit is None and outcome.kind == "failed" and outcome.code == 70
    assert "rank 1 ended without an error report" in outcome.message


def test_a_killed_torchrun_is_named_by_its_signal():
    outcome = reported(-9, word(0, "running", 70), word(1, "running", 70))
    assert outcome.code == 70 and "torchrun was killed by signal 9" in outcome.message


def test_workers_that_never_started_point_to_torchruns_log():
    assert "torchrun.log" in reported(1, None, None).message


DONE = (word(0, "done", step=8),)
SAVED = (word(0, "preempted", 75),)
REFUSED = (word(0, "failed", 64, message="refused"), word(1, "running", 70))
SILENT = (word(0, "running", 70),)


@pytest.mark.parametrize(
    ("statuses", "seen", "code"),
    [
        (DONE, {"hang": "torchrun has not ended"}, ExitCode.FINISHED),
        (DONE, {"fault": OSError()}, ExitCode.FINISHED),
        (SAVED, {"hang": "torchrun has not ended"}, ExitCode.PREEMPTED),
        (SAVED, {"stop_request": KeyboardInterrupt()}, ExitCode.PREEMPTED),
        (SAVED, {"fault": OSError()}, ExitCode.UNEXPECTED),
        ((*SAVED, word(1, "running", 70)), {}, ExitCode.UNEXPECTED),
        (REFUSED, {"hang": "rank 1"}, ExitCode.INVALID_CONFIG),
        (REFUSED, {"stop_request": KeyboardInterrupt()}, ExitCode.INVALID_CONFIG),
        (SILENT, {"hang": "rank 1"}, ExitCode.HUNG),
        (SILENT, {}, ExitCode.UNEXPECTED),
        (SILENT, {"stop_request": KeyboardInterrupt()}, ExitCode.PREEMPTED),
    ],
)
def test_what_is_known_best_decides(statuses, seen, code):
    assert outcome_of(Evidence(1, statuses, "logs", **seen)).code == code


@pytest.mark.parametrize(
    ("statuses", "seen", "kind"),
    [
        (SILENT, {"fault": OSError()}, OSError),
        (SILENT, {"fault": OSError(), "stop_request": KeyboardInterrupt()}, Preempted),
        (SAVED, {"fault": OSError(), "stop_request": KeyboardInterrupt()}, Preempted),
        (DONE, {"fault": OSError()}, type(None)),
        (DONE, {"stop_request": KeyboardInterrupt()}, Preempted),
        (REFUSED, {"stop_request": KeyboardInterrupt()}, type(None)),
        (
            REFUSED,
            {"fault": OSError(), "stop_request": KeyboardInterrupt()},
            type(None),
        ),
    ],
)
def test_a_request_to_stop_ends_the_command_also_beside_a_fault(
    tmp_path, statuses, seen, kind
):
    evidence = Evidence(1, statuses, "logs", **seen)
    assert (
        type(exception_of(outcome_of(evidence), evidence, RunFolder(tmp_path))) is kind
    )


def test_every_exit_code_has_its_ending():
    assert set(ENDINGS) == set(ExitCode)
