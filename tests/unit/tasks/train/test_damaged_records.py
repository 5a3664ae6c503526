"""Records of a run that cannot be read: named, written again where something else says what stood there, never a crash."""

import json
from pathlib import Path

import pytest

from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.gc import Rules, leftovers
from infini_llama.tasks.runs.load import lineage_of
from infini_llama.tasks.runs.record import RunRecord
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    append_attempt,
    attempt_folders,
    attempts,
    lacking_steps,
    read_metrics,
)
from infini_llama.tasks.runs.runs import list_runs
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.train.prepare import record_killed_attempts
from infini_llama.tasks.train.stage import finished, summarize
from support.made_up_runs import LINEAGE, add_checkpoint

DAMAGE = ["", "{", "[1, 2]", "null", "7", "[" * 100_000, "\0\0", '{"a": 1e', "{}", '{"dataset": {}, "steps": "16"}']
SUMMARY = {"run": "one", "steps": 16, "stopped_early": None, "sample": "", "validation_loss": 2.0, "tokens": 9}
SUMMARY |= {"validation_bits_per_token": 3, "unigram_entropy_bits": 4.0, "bits_per_byte": 1.0, "tokens_per_second": 1.0}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A finished run of 16 steps."""
    run = RunFolder(tmp_path / "runs" / "one")
    run.checkpoints.mkdir(parents=True)
    run.lineage.write_text(json.dumps(LINEAGE | {"train": {"max_steps": 16}}))
    run.summary.write_text(json.dumps(SUMMARY))
    add_checkpoint(run, 16, 2.0)
    return run


def add_attempt(run: RunFolder, number: int, job: object) -> Path:
    folder = run.path / "logs" / f"attempt-{number:02d}"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job))
    return folder


@pytest.mark.parametrize("text", DAMAGE, ids=lambda text: repr(text[:30]))
def test_a_damaged_lineage_is_taken_from_the_newest_attempt_that_has_it(run, caplog, text):
    for number, lineage in ((1, "older"), (2, "newer")):
        add_attempt(run, number, {"lineage": LINEAGE | {"resumed_from": lineage}})
    add_attempt(run, 3, {"lineage": []})
    add_attempt(run, 4, [])
    run.lineage.write_text(text)
    assert run.read_lineage().resumed_from == lineage_of(run.path).resumed_from == "newer"
    assert str(run.lineage) in caplog.text and "attempt-02" in caplog.text


@pytest.mark.parametrize("text", DAMAGE, ids=lambda text: repr(text[:30]))
def test_a_damaged_lineage_without_a_copy_is_named(run, caplog, text):
    run.lineage.write_text(text)
    for reads in (run.read_lineage, lambda: lineage_of(run.path), lambda: RunRecord(run.path).lineage):
        with pytest.raises(Damaged, match=str(run.lineage)):
            reads()
    home = run.path.parents[1]
    with pytest.raises(Damaged, match=str(run.lineage)):
        leftovers(home, Rules(older_than=0.0))
    assert list_runs(home) == [] and str(run.lineage) in caplog.text


@pytest.mark.parametrize("text", DAMAGE, ids=lambda text: repr(text[:30]))
def test_a_damaged_summary_is_named(run, caplog, text):
    assert finished(run, 16, None).validation_loss == 2.0
    run.summary.write_text(text)
    assert finished(run, 16, None) is None
    assert str(run.summary) in caplog.text or text == "{}"


@pytest.mark.parametrize("name", ["result.json", "environment.json"])
@pytest.mark.parametrize("text", DAMAGE, ids=lambda text: repr(text[:30]))
def test_a_damaged_result_or_environment_is_named(run, caplog, name, text):
    (run.path / name).write_text(text)
    record = RunRecord(run.path)
    assert record.result is None and record.environment is None
    assert str(run.path / name) in caplog.text


def test_a_run_beyond_a_lowered_max_steps_is_finished(run):
    assert finished(run, 12, None).steps == 16 and finished(run, 20, None) is None


def test_a_summary_without_metrics_uses_the_checkpoint(run):
    (run.path / "result.json").write_text(json.dumps({"steps": 16, "stopped_early": None, "sample": ""}))
    summary = summarize(run, 4.0)
    assert (summary.steps, summary.tokens, summary.validation_loss) == (16, 0, None)
    assert finished(run, 16, None) == summary


@pytest.mark.parametrize("line", ["[1,2]", '{"attempt": "2"}', '{"attempt": 2, "code": 70', "\0", "null"])
def test_a_damaged_line_of_attempts_is_named_and_rebuilt(run, caplog, line):
    append_attempt(run, AttemptRecord(attempt=1, invocation=None, kind="done", code=0))
    with run.attempts.open("a") as file:
        file.write(line + "\n")
    add_attempt(run, 1, {})
    add_attempt(run, 2, {})
    assert record_killed_attempts(run) == 2
    assert [(record.attempt, record.code) for record in attempts(run)] == [(1, 0), (2, 70)]
    assert f"{run.attempts}: line 2" in caplog.text and "cannot be read" in attempts(run)[-1].message


def test_invalid_utf_8_lines_are_bad_lines(run):
    run.attempts.write_bytes(b"\xff\xfe\n")
    (run.path / "config.yaml").write_bytes(b"\xff: [")
    (run.path / "evaluations.jsonl").write_bytes(b"\xff\n[1]\n")
    run.samples.write_bytes(b"\xff\n[1]\n")
    record = RunRecord(run.path)
    assert (record.attempts, record.evaluations, record.samples) == ([], [], [])
    assert record.config == {"train": {"max_steps": 16}} and record.goodput.wall == 0.0


def test_a_folder_that_is_no_attempt_is_ignored(run):
    folder = add_attempt(run, 2, [])
    for name in ("attempt-old", "attempt-01.bak", "attempt-", "attempt-2 (copy)"):
        (folder.parent / name).mkdir()
    assert attempt_folders(run) == [folder] and record_killed_attempts(run) == 2
    assert RunRecord(run.path).goodput.wall == 0.0


def test_missing_steps_in_metrics_are_found(run):
    assert lacking_steps(run, 0) == [] and lacking_steps(run, 3) == [1, 2, 3], "there is no file"
    run.metrics.write_text("".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in (1, 2, 5, 6)))
    assert len(read_metrics(run)) == 4 and lacking_steps(run, 2) == [] and lacking_steps(run, 6) == [3, 4]


def test_a_run_that_began_at_another_runs_checkpoint_lacks_nothing_before_it(run, tmp_path):
    other = checkpoints.checkpoint_path(tmp_path / "other", 20)
    run.lineage.write_text(json.dumps(LINEAGE | {"resumed_from": str(other)}))
    assert lacking_steps(run, 20) == []
    append_attempt(run, AttemptRecord(attempt=1, kind="failed", code=70, from_step=20))
    run.metrics.write_text(json.dumps({"kind": "train", "step": 22}) + "\n")
    assert lacking_steps(run, 22) == [21]
    own = checkpoints.checkpoint_path(run.checkpoints, 16)
    run.lineage.write_text(json.dumps(LINEAGE | {"resumed_from": str(own)}))
    assert len(lacking_steps(run, 22)) == 21
