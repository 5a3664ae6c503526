"""Records of a run that cannot be read: named, written again where something else says what stood there, never a crash."""

import json
import re
import shutil
from pathlib import Path

import pytest

from infini_llama.configs.errors import DataError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.evaluation import EvaluationRequest, TextLoss
from infini_llama.tasks.records.metrics import PerplexityLine
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.records.summary import RunSummary
from infini_llama.tasks.report.run import run_document, write_report
from infini_llama.tasks.runs.checkpoints import committed
from infini_llama.tasks.runs.gc import Rules, collect, leftovers
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    append_attempt,
    attempt_folders,
    read_attempts,
    write_attempt_plan,
)
from infini_llama.tasks.runs.run_reader import RunReader, list_runs
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.locks import Lock
from infini_llama.tasks.storage.record_files import append_line
from infini_llama.tasks.train.attempt_folder import record_killed_attempts
from infini_llama.tasks.train.stage import write_summary
from support.made_up_runs import add_checkpoint, add_result
from support.records import make_attempt, make_lineage

# one each of what tests/unit/tasks/storage/test_record_files.py finds: no JSON, no object, wrong fields
DAMAGE = ["{", "[1, 2]", '{"dataset": {}, "steps": "16"}']


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A finished run of 16 steps."""
    run = RunFolder(tmp_path / "runs" / "one")
    run.checkpoints.mkdir(parents=True)
    run.write(run.lineage, make_lineage())
    add_checkpoint(run.checkpoints, 16, 2.0)
    add_result(run, 16)
    return run


def add_attempt(
    run: RunFolder, number: int, attempt: AttemptPlan | None = None
) -> Path:
    """The folder of an attempt; its plan.json is damaged where none is given."""
    folder = run.path / "logs" / f"attempt-{number:02d}"
    folder.mkdir(parents=True)
    if attempt is None:
        (folder / "plan.json").write_text("[]")
    else:
        write_attempt_plan(folder, attempt)
    return folder


@pytest.mark.parametrize("text", DAMAGE, ids=lambda text: repr(text[:30]))
def test_a_damaged_lineage_is_taken_from_the_newest_attempt_that_has_it(
    run, caplog, text
):
    for number, name in ((1, "older"), (2, "newer")):
        add_attempt(
            run,
            number,
            make_attempt(run.path, lineage=changed(make_lineage(), resumed_from=name)),
        )
    add_attempt(run, 3)
    run.lineage.write_text(text)
    assert run.require_lineage().resumed_from == "newer"
    assert str(run.lineage) in caplog.text and "attempt-02" in caplog.text


def test_a_removed_lineage_is_taken_from_an_attempt(run, tmp_path, caplog):
    lineage = make_lineage()
    lineage = changed(
        lineage, dataset=changed(lineage.dataset, path="datasets/used-0123456789ab")
    )
    used = run.dataset(lineage.dataset.path)
    used.mkdir(parents=True)
    rules = Rules(older_than=0.0, keep_checkpoints=2, unused_datasets=True)
    run.lineage.unlink()
    with pytest.raises(
        Damaged, match=r"Put the file back from a backup"
    ):  # its checkpoints may be of any settings
        run.read_lineage()
    assert not [
        each for each in leftovers(tmp_path, rules) if each.kind == "dataset of no run"
    ]
    add_attempt(run, 1, make_attempt(run.path, lineage=lineage))
    assert run.read_lineage() == lineage and str(run.lineage) in caplog.text
    assert [found.run for found in list_runs(tmp_path)] == ["one"]
    # The report of a run that was killed before its first step, which has no metrics.jsonl.
    assert not run.metrics.exists()
    assert RunReader(run.path).results.age >= 0
    assert not [
        each for each in leftovers(tmp_path, rules) if each.kind == "dataset of no run"
    ]


@pytest.mark.parametrize("text", DAMAGE, ids=lambda text: repr(text[:30]))
def test_a_damaged_lineage_without_a_copy_is_named(run, tmp_path, caplog, text):
    run.lineage.write_text(text)
    for reads in (run.read_lineage, lambda: RunReader(run.path).lineage):
        with pytest.raises(Damaged, match=str(run.lineage)):
            reads()
    assert list_runs(tmp_path) == [] and str(run.lineage) in caplog.text


def test_a_damaged_lineage_ends_neither_gc_nor_runs_of_the_others(
    run, tmp_path, caplog
):
    shutil.copytree(run.path, tmp_path / "runs" / "two")
    for name in ("one", "two"):
        (tmp_path / "runs" / name / ".report.html.1-0123abcd.tmp").touch()
        (
            tmp_path / "runs" / name / "checkpoints" / "abandoned" / "step-00000004"
        ).mkdir(parents=True)
    (tmp_path / "datasets" / "unused-0123456789ab").mkdir(parents=True)
    rules = Rules(older_than=0.0, keep_checkpoints=2, unused_datasets=True)
    assert {path.kind for path in leftovers(tmp_path, rules)} == {
        "temporary",
        "abandoned by a rollback",
        "dataset of no run",
    }
    run.lineage.unlink()
    run.lineage.mkdir()
    assert [file.path for file in collect(tmp_path, rules, yes=True).files] == [
        "runs/two/.report.html.1-0123abcd.tmp"
    ]
    assert str(run.lineage) in caplog.text and [
        results.run for results in list_runs(tmp_path)
    ] == ["two"]


@pytest.mark.parametrize(
    "name",
    [
        "lock",
        "metrics.jsonl",
        "attempts.jsonl",
        "evaluations.jsonl",
        "logs/attempt-01/time.jsonl",
    ],
)
def test_a_folder_in_place_of_a_file_is_named_or_has_no_effect(run, caplog, name):
    add_attempt(run, 1, make_attempt(run.path))
    (run.path / name).mkdir(parents=True)
    described = RunReader(run.path).description
    assert (
        described.checkpoints
        and RunReader(run.path).goodput
        and RunReader(run.path).evaluations == []
    )
    assert str(run.path / name) in caplog.text or name == "lock"
    with pytest.raises(DataError, match=name):
        if name == "lock":
            with Lock(run.path / name):
                pass
        else:
            append_line(
                run.path / name,
                AttemptRecord(attempt=1, kind="done", code=0),
                run.read_id(),
            )


@pytest.mark.parametrize(
    ("steps", "missing"),
    [(range(1, 12), "12, 13, 14, 15, 16"), ((1, 2, 5, *range(6, 17)), "3, 4"), ((), "1, 2, 3, 4, 5 and 11 more"),
     (range(9, 17), "1, 2, 3, 4, 5 and 3 more")],
    ids=str,
)  # fmt: skip
def test_missing_steps_up_to_the_checkpoint_are_named(run, caplog, steps, missing):
    run.metrics.write_text(
        "".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in steps)
    )
    assert len(RunReader(run.path).metrics) == len(steps)
    assert f"{run.metrics} has no line of step {missing}:" in caplog.text
    caplog.clear()
    run.write(
        run.lineage,
        changed(
            run.require_lineage(), resumed_from="another/checkpoints/step-00000008"
        ),
    )
    assert len(RunReader(run.path).metrics) == len(steps)
    assert ("has no line of step" in caplog.text) == (min(steps, default=0) < 9), (
        "it began at step 9"
    )


def add_settings(run: RunFolder, number: int, from_step: int, **train: object) -> None:
    """An attempt with these settings of section `train`."""
    lineage = changed(make_lineage(), train=changed(TrainingConfig(), **train))
    add_attempt(
        run, number, make_attempt(run.path, from_step=from_step, lineage=lineage)
    )


def test_settings_of_one_attempt_make_nothing_of_another_missing(run, caplog):
    lines = [{"kind": "train", "step": step} for step in range(1, 17)]
    lines += [{"kind": "validation", "step": step} for step in (8, 12, 14, 16)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.samples.write_text(
        "".join(json.dumps({"step": step, "text": "a"}) + "\n" for step in (12, 14))
    )
    for number, (from_step, train) in enumerate(
        (
            (0, {"eval_steps": 8, "sample_prompts": []}),
            (10, {"eval_steps": 6}),
            (12, {"eval_steps": 2}),
        ),
        1,
    ):
        add_settings(run, number, from_step, **train)
        append_attempt(run, AttemptRecord(attempt=number, kind="failed", code=70))
    run.write(
        run.lineage,
        changed(run.require_lineage(), train=changed(TrainingConfig(), eval_steps=2)),
    )
    reader = RunReader(run.path)
    assert len(reader.metrics) == 20 and len(reader.samples) == 2 and not caplog.text


def test_missing_validations_texts_attempts_and_measurements_are_named(run, caplog):
    lines = [{"kind": "train", "step": step} for step in range(1, 17)]
    lines += [{"kind": "validation", "step": step} for step in (4, 12, 16)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.samples.write_text(json.dumps({"step": 12, "text": "a b"}) + "\n")
    add_settings(run, 1, 0, eval_steps=4, sample_prompts=["a"])
    add_settings(run, 2, 12, eval_steps=1000)
    append_attempt(run, AttemptRecord(attempt=2, kind="done", code=0, step=16))
    run.evaluations.touch()
    reader = RunReader(run.path)
    assert (
        len(reader.metrics) == 19
        and len(reader.samples) == 1
        and reader.evaluations == []
    )
    for path, number in ((run.metrics, 8), (run.samples, 4), (run.attempts, 1)):
        assert re.search(rf"{re.escape(str(path))} has no [^:]* {number}:", caplog.text)
    assert (
        str(run.evaluations) in caplog.text and "has no line of step" not in caplog.text
    )


@pytest.mark.parametrize(
    ("finished", "measured", "missing"),
    [
        (False, None, []),
        (True, None, ["perplexity", "passkey", "export"]),
        (True, "another checkpoint", ["perplexity", "passkey", "export"]),
        (True, "the newest", ["passkey", "export"]),
    ],
)
def test_a_missing_evaluation_after_training_is_logged(
    make_run, caplog, finished, measured, missing
):
    run = RunFolder(make_run(finished=finished))
    run.write_config(
        run.read_config()
        | {"evaluate": {"after_training": ["perplexity", "passkey", "export"]}}
    )
    if measured:
        newest = committed(run.checkpoints)[0]
        digest = newest.digest if measured == "the newest" else "blake3:0"
        asked = EvaluationRequest(
            checkpoint=newest.path.name,
            digest=digest,
            sequences=None,
            passkey_lengths=(),
        )
        loss = TextLoss(loss=1.0, perplexity=2.7, bits_per_byte=1.5, tokens=9, bytes=9)
        about = {
            "run": "run",
            "checkpoint": newest.path.name,
            "step": newest.step,
            "device": "cpu",
        }
        line = PerplexityLine(
            **about, kind="evaluate", asked=asked, text="rows", stream=False, model=loss
        )
        append_line(run.evaluations, line, run.read_id())
    run_document(RunReader(run.path))
    assert "after_training" not in caplog.text, (
        "the card of the training is made before the evaluation"
    )
    write_report(run.path)
    logged = [
        record.args for record in caplog.records if record.name == "infini_llama.report"
    ]
    assert logged == [(run.path, kind) for kind in missing]


def test_an_altered_line_is_not_read(run, caplog):
    append_attempt(run, AttemptRecord(attempt=1, kind="done", code=0, seconds=25.0))
    append_attempt(run, AttemptRecord(attempt=2, kind="done", code=0))
    whole = run.attempts.read_text()
    run.attempts.write_text(whole.replace("25.0", "75.0"))
    assert [record.attempt for record in read_attempts(run)] == [
        2
    ] and f"{run.attempts}: line 1 " in caplog.text
    run.attempts.write_text(whole)
    run.lineage.write_text(json.dumps(make_lineage().to_json() | {"run_id": "another"}))
    assert read_attempts(run) == [], "the lines are of another run"


def test_a_line_whose_checksum_is_not_its_last_field_is_not_read(run, caplog):
    append_attempt(run, AttemptRecord(attempt=1, kind="failed", code=70))
    fields = json.loads(run.attempts.read_text())
    run.attempts.write_text(json.dumps({"crc32": fields.pop("crc32")} | fields) + "\n")
    assert read_attempts(run) == [] and f"{run.attempts}: line 1 " in caplog.text
    # As one who changes it on purpose does.
    run.attempts.write_text(json.dumps(fields) + "\n")
    assert len(read_attempts(run)) == 1


def test_an_altered_configuration_of_a_run_is_named(run, caplog):
    run.write_config({"train": {"learning_rate": 0.25}})
    assert (
        RunReader(run.path).config == {"train": {"learning_rate": 0.25}}
        and str(run.config) not in caplog.text
    )
    text = run.config.read_text().replace("0.25", "0.75")
    run.config.write_text(text)
    assert (
        RunReader(run.path).config["train"]["learning_rate"]
        == TrainingConfig().learning_rate
        and str(run.config) in caplog.text
    )
    # As one who changes it on purpose does.
    run.config.write_text(text.partition("\n")[2])
    assert RunReader(run.path).config == {"train": {"learning_rate": 0.75}}
    run.config.write_bytes(b"\xff: [")
    assert RunReader(run.path).config["train"] == make_lineage().train.model_dump(
        mode="json"
    )


@pytest.mark.parametrize("name", ["result.json", "environment.json"])
@pytest.mark.parametrize("text", DAMAGE, ids=lambda text: repr(text[:30]))
def test_a_damaged_result_or_environment_is_named(run, caplog, name, text):
    (run.path / name).write_text(text)
    record = RunReader(run.path)
    assert (record.result if name == "result.json" else record.environment) is None
    assert str(run.path / name) in caplog.text


@pytest.mark.parametrize(
    ("max_steps", "state"), [(12, "finished"), (16, "finished"), (20, "not begun")]
)
def test_a_run_is_finished_once_it_has_its_steps_or_more(run, max_steps, state):
    run.write(run.lineage, changed(run.require_lineage(), max_steps=max_steps))
    assert RunReader(run.path).state == state and (
        RunReader(run.path).summary is None
    ) == (state != "finished")


@pytest.mark.parametrize(
    ("patience", "state"), [(3, "finished"), (4, "not begun"), (None, "not begun")]
)
def test_a_run_that_stopped_early_is_finished_under_the_same_patience(
    run, patience, state
):
    train = changed(TrainingConfig(), early_stopping_patience=patience)
    run.write(run.lineage, changed(run.require_lineage(), max_steps=20, train=train))
    add_result(run, 16, stopped_early=3)
    assert RunReader(run.path).state == state


def test_a_result_that_is_not_of_the_newest_checkpoint_is_not_used(run, caplog):
    append_attempt(run, AttemptRecord(attempt=1, kind="done", code=0))
    add_result(run, 16, checkpoint_digest="blake3:0")
    assert RunReader(run.path).result is None and str(run.result) in caplog.text
    assert RunReader(run.path).state == "to finish"
    add_result(run, 16)
    assert RunReader(run.path).result
    add_checkpoint(run.checkpoints, 20)
    assert RunReader(run.path).result is None


def test_a_summary_without_metrics_has_no_losses(run, caplog):
    summary = write_summary(run)
    assert (summary.steps, summary.tokens, summary.validation_loss) == (16, 0, None)
    assert run.read(RunSummary, run.summary) == summary
    assert RunReader(run.path).results.step == 16, "its checkpoint says so"
    measured = changed(summary, train_loss=3.0)
    run.write(run.summary, measured)
    assert write_summary(run) == measured, "what nothing else records is kept"
    run.result.unlink()
    with pytest.raises(Damaged, match=str(run.result)):
        write_summary(run)
    assert (
        RunReader(run.path).result is None and f"{run.result} is missing" in caplog.text
    )


@pytest.mark.parametrize(
    "line", ["[1,2]", '{"attempt": "2"}', '{"attempt": 2, "code": 70', "\0", "null"]
)
def test_a_damaged_line_of_attempts_is_named_and_rebuilt(run, caplog, line):
    append_attempt(run, AttemptRecord(attempt=1, invocation=None, kind="done", code=0))
    with run.attempts.open("a") as file:
        file.write(line + "\n")
    add_attempt(run, 1)
    add_attempt(run, 2)
    assert record_killed_attempts(run) == 2
    assert [(record.attempt, record.code) for record in read_attempts(run)] == [
        (1, 0),
        (2, 70),
    ]
    assert (
        f"{run.attempts}: line 2" in caplog.text
        and "cannot be read" in read_attempts(run)[-1].message
    )


def test_a_folder_that_is_no_attempt_is_ignored(run):
    folder = add_attempt(run, 2)
    for name in ("attempt-old", "attempt-01.bak", "attempt-", "attempt-2 (copy)"):
        (folder.parent / name).mkdir()
    assert attempt_folders(run) == [folder] and record_killed_attempts(run) == 2
    assert RunReader(run.path).goodput.wall == 0.0
