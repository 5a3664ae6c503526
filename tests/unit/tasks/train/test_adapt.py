"""What the training stage changes after an attempt, and that it remembers it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_llama.configs.loading import parse_config
from infini_llama.tasks.records.lineage import SampleRange
from infini_llama.tasks.records.status import RankError
from infini_llama.tasks.runs.checkpoints import FORMAT_VERSION, KIND, checkpoint_path, committed, step_of
from infini_llama.tasks.runs.run_folder import RunFolder, cut_metrics, read_metrics
from infini_llama.tasks.storage.artifacts import commit, staging
from infini_llama.tasks.train.adapt import halve_micro_batch, roll_back
from infini_llama.tasks.train.run_context import RunContext
from infini_llama.tasks.train.worker.data.order import next_sample
from support.made_up_runs import LINEAGE
from support.records import make_context, make_plan


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path)
    run.checkpoints.mkdir()
    run.lineage.write_text(json.dumps(LINEAGE))
    for step in (10, 20, 30):
        add_checkpoint(run, step)
    return run


def add_checkpoint(run: RunFolder, step: int) -> None:
    target = checkpoint_path(run.checkpoints, step)
    staged = staging(target)
    (staged / "train_state.json").write_text(json.dumps({"step": step, "samples": step * 8, "validation_loss": None}))
    commit(staged, target, KIND, FORMAT_VERSION, meta={}, content={"step": step})


def diverged(first_skip: int, samples: int) -> RankError:
    return RankError(type="Diverged", first_skip=first_skip, samples=samples)


def test_the_micro_batch_halves_to_what_divides_a_ranks_share_and_stays_so(run):
    def context(micro: int, batch: int) -> RunContext:
        config = parse_config(
            {"data": {"source": "python-stdlib"}, "train": {"global_batch_size": batch, "micro_batch_size": 1}}
        )
        return make_context(run, config, plan=make_plan(nproc_per_node=2, micro_batch_size=micro))

    sizes = []
    while halve_micro_batch(context(6, 24)):
        sizes.append(run.read(run.lineage)["micro_batch_size"])
    assert sizes == [3, 1]
    assert halve_micro_batch(context(10, 20)) is False, "it is one already"


def test_a_rollback_discards_later_checkpoints_and_skips_the_samples(run):
    assert roll_back(run, diverged(25, 260), limit=2)
    assert [step_of(path) for path in committed(run.checkpoints)] == [20, 10]
    assert run.read(run.lineage)["skipped_samples"] == [{"first": 160, "end": 260}]
    assert roll_back(run, diverged(3, 40), limit=2), "before every checkpoint: from the start"
    assert run.read(run.lineage)["skipped_samples"][-1] == {"first": 0, "end": 40}
    assert not roll_back(run, diverged(3, 40), limit=2)


def test_a_rollback_that_diverges_again_goes_further_back(run):
    assert roll_back(run, diverged(35, 300), limit=1)
    assert run.read(run.lineage)["skipped_samples"] == [{"first": 240, "end": 300}]
    assert roll_back(run, diverged(31, 320), limit=1), "one rollback, to an older checkpoint"
    assert [step_of(path) for path in committed(run.checkpoints)] == [20, 10]
    assert run.read(run.lineage)["skipped_samples"] == [{"first": 160, "end": 320}]
    assert roll_back(run, diverged(21, 340), limit=1) and roll_back(run, diverged(11, 360), limit=1)
    assert committed(run.checkpoints) == []
    assert run.read(run.lineage)["skipped_samples"] == [{"first": 0, "end": 360}], "from the start"
    assert not roll_back(run, diverged(1, 380), limit=1), "nothing older exists"


def test_a_rollback_after_progress_is_another_one(run):
    assert roll_back(run, diverged(15, 150), limit=1)
    add_checkpoint(run, 20)
    assert not roll_back(run, diverged(25, 260), limit=1)
    assert roll_back(run, diverged(25, 260), limit=2)
    assert run.read(run.lineage)["skipped_samples"] == [{"first": 80, "end": 150}, {"first": 160, "end": 260}]


def test_no_rollback_where_other_samples_would_be_seen_twice(run):
    assert roll_back(run, diverged(25, 260), limit=3, spare=100)
    assert not roll_back(run, diverged(3, 40), limit=3, spare=139)
    assert run.read(run.lineage)["skipped_samples"] == [{"first": 160, "end": 260}]
    assert roll_back(run, diverged(3, 280), limit=3, spare=280), "the ranges overlap"


def test_skipped_samples_are_passed_over_also_where_ranges_touch():
    ranges = [SampleRange(first=first, end=end) for first, end in ((40, 60), (10, 20), (20, 40))]
    assert [next_sample(number, ranges) for number in (0, 9, 10, 19, 20, 59, 60)] == [0, 9, 60, 60, 60, 60, 60]


@given(step=st.integers(0, 12), torn=st.integers(0, 30))
def test_metrics_are_cut_back_to_the_step_of_the_checkpoint(tmp_path_factory, step, torn):
    run = RunFolder(tmp_path_factory.mktemp("run"))
    lines = [
        json.dumps({"kind": kind, "step": number}) + "\n" for number in range(1, 11) for kind in ("train", "validation")
    ]
    run.metrics.write_text("".join(lines) + lines[0][:torn].rstrip("\n"))
    cut_metrics(run, step)
    assert run.metrics.read_text() == "".join(lines[: 2 * min(step, 10)])
    assert len(read_metrics(run)) == 2 * min(step, 10)
