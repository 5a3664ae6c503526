"""Every end of an attempt gets its class, also one without a word."""

from infini_llama.tasks.records.status import RankError, RankStatus
from infini_llama.tasks.runs.status import classify


def word(rank, state, code=0, step=5, time=1.0, message=None, kind="RuntimeError", peer_lost=False):
    error = RankError(type=kind, message=message, peer_lost=peer_lost) if message else None
    place = {"pid": 1, "node": 0, "host": "here", "machine": "here"}
    return RankStatus(rank=rank, state=state, code=code, step=step, time=time, error=error, **place)


def test_all_ranks_done_is_done_whatever_torchruns_exit_code():
    assert classify(1, [word(0, "done"), word(1, "done")], "logs").kind == "done"


def test_all_preempted_carries_the_step_despite_torchruns_code():
    outcome = classify(1, [word(0, "preempted", 75, 7), word(1, "preempted", 75, 7)], "logs")
    assert (outcome.kind, outcome.code, outcome.step) == ("preempted", 75, 7)


def test_the_first_rank_that_failed_by_itself_is_the_cause():
    lost = word(0, "failed", 70, time=1.0, message="Connection closed by peer", peer_lost=True)
    cause = word(1, "failed", 65, time=2.0, message="shard is damaged", kind="DataError")
    outcome = classify(1, [lost, cause], "logs")
    assert (
        (outcome.code, outcome.culprit) == (65, 1)
        and "rank 1" in outcome.message
        and "shard is damaged" in outcome.message
    )


def test_a_killed_rank_is_named_and_not_the_peer_that_lost_it():
    lost = word(0, "failed", 70, message="Connection closed by peer [127.0.0.1]:1", peer_lost=True)
    outcome = classify(1, [lost, word(1, "running", 70)], "logs")
    assert outcome.culprit is None and outcome.kind == "failed" and outcome.code == 70
    assert "rank 1 ended without an error report" in outcome.message


def test_an_error_of_its_own_that_mentions_gloo_is_the_ranks_own():
    own = word(1, "failed", 65, time=2.0, message="/data/gloo/NCCL.txt: Broken pipe", kind="DataError")
    assert classify(1, [word(0, "running", 70), own], "logs").culprit == 1


def test_a_killed_torchrun_is_named_by_its_signal():
    outcome = classify(-9, [word(0, "running", 70), word(1, "running", 70)], "logs")
    assert outcome.code == 70 and "torchrun was killed by signal 9" in outcome.message


def test_workers_that_never_started_point_to_torchruns_log():
    assert "torchrun.log" in classify(1, [None, None], "logs").message


def test_one_preempted_and_one_silent_is_a_failure():
    assert classify(1, [word(0, "preempted", 75), word(1, "running", 70)], "logs").kind == "failed"


def test_out_of_memory_keeps_its_code():
    assert (
        classify(1, [word(0, "failed", 71, message="CUDA out of memory", kind="OutOfMemoryError")], "logs").code == 71
    )
