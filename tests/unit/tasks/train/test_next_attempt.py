"""What the next attempt is after one that ran out of memory or diverged."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_llama.configs.errors import ExitCode, TrainFailed
from infini_llama.configs.loading import parse_config
from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess.tokens.order import next_sample
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.lineage import SampleRange
from infini_llama.tasks.records.status import RankError
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.checkpoints import checkpoint_path, committed
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    cut_metrics,
    read_metrics,
    size_of,
)
from infini_llama.tasks.storage import record_files
from infini_llama.tasks.train.attempt import next_attempt, what_follows
from infini_llama.tasks.train.attempt_folder import prepare
from infini_llama.tasks.train.outcome import Outcome
from infini_llama.tasks.train.planning import plan_next_attempt
from support.made_up_runs import add_checkpoint
from support.records import make_attempt, make_plan


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "runs" / "mine")
    run.checkpoints.mkdir(parents=True)
    for step in (10, 20, 30):
        add_state(run, step)
    return run


@pytest.fixture
def begun(run):
    """begun(**sections): the first attempt of the run."""

    def begin(plan=None, **sections: dict) -> AttemptPlan:
        own = {
            "data": {"source": "python-stdlib"},
            "runtime": {"home": str(run.path.parents[1]), "name": "mine"},
        }
        own["runtime"] |= sections.pop("runtime", {})
        return make_attempt(
            run.path, parse_config(own | sections), plan=plan or make_plan()
        )

    return begin


def add_state(run: RunFolder, step: int) -> None:
    add_checkpoint(run.checkpoints, step, samples=step * 8, model={}, world_size=1)


def after(
    attempt: AttemptPlan, code: int, error: RankError | None = None
) -> AttemptPlan | None:
    return next_attempt(attempt, Outcome("failed", code, "", error=error))


def diverged(attempt: AttemptPlan, first_skip: int, samples: int) -> AttemptPlan | None:
    return after(
        attempt, 72, RankError(type="Diverged", first_skip=first_skip, samples=samples)
    )


def skipped(attempt: AttemptPlan) -> list[tuple[int, int]]:
    return [(one.first, one.end) for one in attempt.lineage.skipped_samples]


def test_out_of_memory_halves_the_micro_batch_to_a_divisor_of_the_share(begun):
    train = {"global_batch_size": 24, "micro_batch_size": 1}
    attempt = begun(make_plan(nproc_per_node=2, micro_batch_size=6), train=train)
    sizes = [attempt.micro_batch_size]
    while attempt := after(attempt, 71):
        sizes.append(attempt.micro_batch_size)
        assert attempt.plan.micro_batch_size == 6, "the plan stays"
    assert sizes == [6, 3, 1]


@pytest.mark.parametrize("code", ExitCode)
def test_another_attempt_is_made_at_once_after_three_codes(begun, code):
    attempt = begun(train={"global_batch_size": 8, "micro_batch_size": 8})
    following = after(
        attempt, code, RankError(type="Diverged", first_skip=25, samples=260)
    )
    assert (following is not None) == (code in (71, 72, 75))


def test_workers_that_are_stopped_again_and_again_use_up_the_budget_of_retries(begun):
    first = begun()
    again = after(first, 75)
    assert again is not None and again.from_step == 30
    assert after(again, 75) is None, "no newer checkpoint than it began with"
    assert what_follows(75).is_retried


def test_a_rollback_discards_later_checkpoints_and_skips_the_samples(run, begun):
    first = diverged(
        begun(runtime={"max_rollbacks": 2, "rollback_to_start": True}), 25, 260
    )
    assert [checkpoint.step for checkpoint in committed(run.checkpoints)] == [20, 10]
    assert first.from_step == 20 and skipped(first) == [(160, 260)]
    second = diverged(first, 3, 40)
    assert second.resume_from is None and skipped(second)[-1] == (0, 40), (
        "before every checkpoint: from the start"
    )
    add_state(run, 10)
    assert diverged(second, 3, 40) is None
    assert committed(run.checkpoints), "a refused rollback moves nothing"


def test_a_run_with_checkpoints_goes_back_to_its_start_only_where_that_is_allowed(
    run, begun, caplog
):
    assert diverged(begun(), 3, 40) is None
    assert [checkpoint.step for checkpoint in committed(run.checkpoints)] == [
        30,
        20,
        10,
    ]
    for part in ("before step 3;", "all 30 steps", "runtime.rollback_to_start=true"):
        assert part in caplog.text
    checkpoints.abandon_newer(run.checkpoints, 0)
    again = diverged(begun(), 3, 40)
    assert again is not None and again.resume_from is None, "nothing is lost"


def test_a_rollback_to_before_the_named_checkpoint_starts_anew(run, begun):
    named = str(checkpoint_path(run.checkpoints, 30))
    attempt = plan_next_attempt(
        begun(runtime={"resume": named, "rollback_to_start": True})
    )
    assert attempt.from_step == 30
    assert diverged(attempt, 3, 40).resume_from is None


def test_a_rollback_to_another_runs_checkpoint_skips_the_samples_since(
    run, begun, tmp_path
):
    theirs = add_checkpoint(tmp_path / "theirs", 7, samples=56, model={}, world_size=1)
    checkpoints.abandon_newer(run.checkpoints, 0)
    attempt = plan_next_attempt(begun(runtime={"resume": str(theirs)}))
    again = diverged(attempt, 9, 80)
    assert again.from_step == 7 and skipped(again) == [(56, 80)], (
        "what that run has trained on counts for data.curriculum"
    )
    assert diverged(again, 9, 104) is None


def test_a_rollback_that_diverges_again_goes_further_back(run, begun):
    attempt = diverged(
        begun(runtime={"max_rollbacks": 1, "rollback_to_start": True}), 35, 300
    )
    assert skipped(attempt) == [(240, 300)]
    attempt = diverged(attempt, 31, 320)
    assert skipped(attempt) == [(160, 320)], "one rollback, to an older checkpoint"
    assert [checkpoint.step for checkpoint in committed(run.checkpoints)] == [20, 10]
    attempt = diverged(diverged(attempt, 21, 340), 11, 360)
    assert committed(run.checkpoints) == []
    assert skipped(attempt) == [(0, 360)], "from the start"
    assert diverged(attempt, 1, 380) is None, "nothing older exists"


@pytest.mark.parametrize("limit", [1, 2])
def test_a_rollback_after_progress_is_another_one(run, begun, limit):
    attempt = diverged(begun(runtime={"max_rollbacks": limit}), 15, 150)
    add_state(run, 20)
    again = diverged(attempt, 25, 260)
    assert (again and skipped(again)) == (
        None if limit == 1 else [(80, 150), (160, 260)]
    )


def test_skipped_samples_are_passed_over_also_where_ranges_touch():
    ranges = [
        SampleRange(first=first, end=end)
        for first, end in ((40, 60), (10, 20), (20, 40))
    ]
    assert [next_sample(number, ranges) for number in (0, 9, 10, 19, 20, 59, 60)] == [
        0,
        9,
        60,
        60,
        60,
        60,
        60,
    ]


@given(step=st.integers(0, 12), torn=st.integers(0, 30), is_due=st.booleans())
def test_metrics_are_cut_back_to_the_step_of_the_checkpoint(
    tmp_path_factory, step, torn, is_due
):
    """Without the evaluation of that step, where the resumed run makes it."""
    run = RunFolder(tmp_path_factory.mktemp("run"))
    lines = [
        json.dumps({"kind": kind, "step": number}) + "\n"
        for number in range(1, 11)
        for kind in ("train", "validation")
    ]
    run.metrics.write_text("".join(lines) + lines[0][:torn].rstrip("\n"))
    cut_metrics(run, step, is_due)
    left = 2 * min(step, 10) - (is_due and 0 < step <= 10)
    assert run.metrics.read_text() == "".join(lines[:left])
    assert len(read_metrics(run)) == left


def test_each_line_of_metrics_is_parsed_once_when_a_run_resumes(run, monkeypatch):
    """Of a million steps this takes half a minute, and the records of all lines would take gigabytes of memory."""
    run.metrics.write_text(
        "".join(
            json.dumps({"kind": "train", "step": step}) + "\n" for step in range(1, 101)
        )
    )
    parsed = list[bytes]()
    parse_line = record_files.parse_line
    monkeypatch.setattr(
        record_files,
        "parse_line",
        lambda line, *rest: [parsed.append(line), parse_line(line, *rest)][1],
    )
    cut_metrics(run, 90, is_evaluation_due=False)
    assert len(parsed) == 100 and run.metrics.read_text().count("\n") == 90


def test_an_attempt_does_not_train_towards_a_save_for_which_there_is_no_space(
    begun, run, monkeypatch
):
    """As a retry after a full disk would, at which nothing has changed."""
    attempt = plan_next_attempt(begun())
    assert (
        attempt.resume_from is not None and attempt.resume_from.name == "step-00000030"
    )
    size = size_of(attempt.resume_from)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=size - 1))
    with pytest.raises(
        TrainFailed, match=r"no space for another checkpoint in .*step-00000030 takes"
    ):
        prepare(attempt)
    assert not (run.path / "logs").exists()
    assert prepare(changed(attempt, from_step=attempt.max_steps)).is_dir(), (
        "a finished run saves nothing"
    )
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=size))
    assert prepare(attempt).is_dir()
