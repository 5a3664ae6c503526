"""Records of a run that cannot be read: named, written again where something else says what stood there, never a crash."""

import json
import shutil
from pathlib import Path

import pytest

from infini_llama.configs.errors import DataError
from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.gc import Rules, collect, leftovers
from infini_llama.tasks.runs.load import lineage_of
from infini_llama.tasks.runs.record import RunRecord, describe_run, list_runs
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    append_attempt,
    attempt_folders,
    attempts,
    lacking_steps,
    read_metrics,
)
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.json_lines import append_line
from infini_llama.tasks.storage.locks import Lock
from infini_llama.tasks.train.attempt import record_killed_attempts
from infini_llama.tasks.train.stage import finished, summarize
from support.made_up_runs import LINEAGE, add_checkpoint

DAMAGE = ["", "{", "[1, 2]", "null", "7", "[" * 100_000, "\0\0", '{"a": 1e', "{}", '{"dataset": {}, "steps": "16"}']
SUMMARY = {"run": "one", "steps": 16, "stopped_early": None, "samples": [""], "validation_loss": 2.0, "tokens": 9}
SUMMARY |= {"validation_bits_per_token": 3, "unigram_entropy_bits": 4.0, "bits_per_byte": 1.0, "tokens_per_second": 1.0}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A finished run of 16 steps."""
    run = RunFolder(tmp_path / "runs" / "one")
    run.checkpoints.mkdir(parents=True)
    run.lineage.write_text(json.dumps(LINEAGE))
    run.summary.write_text(json.dumps(SUMMARY))
    add_checkpoint(run, 16, 2.0)
    return run


def add_attempt(run: RunFolder, number: int, given: object) -> Path:
    folder = run.path / "logs" / f"attempt-{number:02d}"
    folder.mkdir(parents=True)
    (folder / "resolved.json").write_text(json.dumps(given))
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
    assert list_runs(home) == [] and str(run.lineage) in caplog.text


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def test_a_run_with_a_damaged_lineage_ends_neither_gc_nor_runs_of_the_others(run, caplog):
    home = run.path.parents[1]
    shutil.copytree(run.path, home / "runs" / "two")
    for name in ("one", "two"):
        (home / "runs" / name / ".report.html.1-0123abcd.tmp").touch()
        (home / "runs" / name / "checkpoints" / "abandoned" / "step-00000004").mkdir(parents=True)
    (home / "datasets" / "unused-0123456789ab").mkdir(parents=True)
    rules = Rules(older_than=0.0, keep_checkpoints=2, unused_datasets=True)
    assert {path.kind for path in leftovers(home, rules)} == {
        "temporary",
        "abandoned by a rollback",
        "dataset of no run",
    }
    replaced_by_a_folder(run.lineage)
    assert [file.path for file in collect(home, rules, yes=True).files] == ["runs/two/.report.html.1-0123abcd.tmp"]
    assert str(run.lineage) in caplog.text and [status.run for status in list_runs(home)] == ["two"]


@pytest.mark.parametrize(
    "name", ["lock", "metrics.jsonl", "attempts.jsonl", "evaluations.jsonl", "logs/attempt-01/time.jsonl"]
)
def test_a_folder_in_place_of_a_file_is_named_or_has_no_effect(run, caplog, name):
    add_attempt(run, 1, {"started": {"wall": 1.0, "monotonic": 1.0, "machine": ""}, "from_step": 0})
    (run.path / name).mkdir(parents=True)
    described = describe_run(run.path)
    assert described.checkpoints and RunRecord(run.path).goodput and RunRecord(run.path).evaluations == []
    assert str(run.path / name) in caplog.text or name == "lock"
    with pytest.raises(DataError, match=name):
        if name == "lock":
            with Lock(run.path / name):
                pass
        else:
            append_line(run.path / name, AttemptRecord(attempt=1, kind="done", code=0), run.id)


def test_missing_lines_of_a_finished_run_are_named(run, caplog):
    run.metrics.write_text("".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in range(1, 12)))
    assert RunRecord(run.path).step == 11
    assert f"{run.metrics} has no line for 5 " in caplog.text


def test_an_altered_line_is_not_read(run, caplog):
    append_attempt(run, AttemptRecord(attempt=1, kind="done", code=0, seconds=25.0))
    append_attempt(run, AttemptRecord(attempt=2, kind="done", code=0))
    whole = run.attempts.read_text()
    run.attempts.write_text(whole.replace("25.0", "75.0"))
    assert [record.attempt for record in attempts(run)] == [2] and f"{run.attempts}: line 1 " in caplog.text
    run.attempts.write_text(whole)
    run.lineage.write_text(json.dumps(LINEAGE | {"run_id": "another"}))
    assert attempts(run) == [], "the lines are of another run"


def test_a_line_whose_checksum_is_not_its_last_field_is_not_read(run, caplog):
    append_attempt(run, AttemptRecord(attempt=1, kind="failed", code=70))
    fields = json.loads(run.attempts.read_text())
    run.attempts.write_text(json.dumps({"crc32": fields.pop("crc32")} | fields) + "\n")
    assert attempts(run) == [] and f"{run.attempts}: line 1 " in caplog.text
    run.attempts.write_text(json.dumps(fields) + "\n")  # as one who changes it on purpose does
    assert len(attempts(run)) == 1


def test_an_altered_configuration_of_a_run_is_named(run, caplog):
    run.write_config({"train": {"learning_rate": 0.25}})
    assert RunRecord(run.path).config == {"train": {"learning_rate": 0.25}} and str(run.config) not in caplog.text
    text = run.config.read_text().replace("0.25", "0.75")
    run.config.write_text(text)
    assert (
        RunRecord(run.path).config["train"]["learning_rate"] == TrainingConfig().learning_rate
        and str(run.config) in caplog.text
    )
    run.config.write_text(text.partition("\n")[2])  # as one who changes it on purpose does
    assert RunRecord(run.path).config == {"train": {"learning_rate": 0.75}}


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
    (run.path / "result.json").write_text(json.dumps({"steps": 16, "stopped_early": None, "samples": [""]}))
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
    assert record.config["train"] == TrainingConfig().model_dump(mode="json") and record.goodput.wall == 0.0


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
