"""Every attempt stays on record, whatever cut a line short."""

import json
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    append_attempt,
    cut_metrics,
    read_attempts,
    read_metrics,
)
from infini_llama.tasks.train.binding import bind_run
from support.made_up_runs import add_checkpoint, add_result
from support.records import make_attempt, make_dataset, make_plan

DATASET = make_dataset()


def config_in(home: Path, **sections: dict) -> PipelineConfig:
    given = {
        "data": {"source": "python-stdlib"},
        "runtime": {"home": str(home), "name": "mine"},
    }
    return PipelineConfig.model_validate(given | sections)


def test_a_changed_setting_is_reported_if_it_changes_the_weights(tmp_path, caplog):
    bind_run(config_in(tmp_path), DATASET, make_plan())
    bind_run(config_in(tmp_path, train={"logging_steps": 3}), DATASET, make_plan())
    assert not caplog.text
    bind_run(config_in(tmp_path, train={"adam_beta2": 0.9}), DATASET, make_plan())
    assert "train.adam_beta2: 0.95 before, 0.9 now" in caplog.text
    bind_run(
        config_in(tmp_path / "b", train={"eval_tokens": "1k"}), DATASET, make_plan()
    )
    bind_run(
        config_in(tmp_path / "b", train={"eval_tokens": 1000}), DATASET, make_plan()
    )
    for section, name, before, now in (
        ("train", "seed", 1234, 1),
        ("train", "eval_tokens", None, 1),
        ("model", "hidden_size", 256, 128),
    ):
        with pytest.raises(
            ConfigError, match=rf"{section}\.{name}: {before} before, {now} now"
        ):
            bind_run(
                config_in(tmp_path, **{section: {name: now}}), DATASET, make_plan()
            )


@pytest.mark.parametrize("patience", [None, 3])
def test_evaluations_count_where_they_end_a_run(tmp_path, caplog, patience):
    settings = {"early_stopping_patience": patience}
    bind_run(config_in(tmp_path, train=settings), DATASET, make_plan())
    changed = config_in(tmp_path, train=settings | {"eval_steps": 7})
    bind_run(changed, DATASET, make_plan())
    assert ("train.eval_steps: 100 before, 7 now" in caplog.text) is (
        patience is not None
    )


def test_the_gates_of_a_run_are_set_once(tmp_path):
    model = {"attention": "infini"}
    bind_run(config_in(tmp_path, model=model), DATASET, make_plan())
    changed = config_in(tmp_path, model=model, train={"init_gate": 2.0})
    with pytest.raises(ConfigError, match=r"train\.init_gate: None before, 2\.0 now"):
        bind_run(changed, DATASET, make_plan())


@pytest.mark.parametrize("changed", [{"max_steps": 10}, {"learning_rate": 0.1}])
def test_changed_settings_of_a_finished_run_are_refused(tmp_path, changed):
    settings: dict = {"max_steps": 20, "warmup_steps": 5}
    run = RunFolder(tmp_path / "runs" / "mine")
    bind_run(config_in(tmp_path, train=settings), DATASET, make_plan())
    add_checkpoint(run.checkpoints, 20)
    add_result(run, 20)
    before = [path.read_bytes() for path in (run.lineage, run.config)]
    ((name, value),) = changed.items()
    with pytest.raises(
        ConfigError, match=rf"finished at step 20.*\n.*train\.{name}: .*{value} now"
    ):
        bind_run(config_in(tmp_path, train=settings | changed), DATASET, make_plan())
    free = config_in(tmp_path, train=settings | {"logging_steps": 3})
    assert bind_run(free, DATASET, make_plan()).train.logging_steps != 3
    assert [path.read_bytes() for path in (run.lineage, run.config)] == before
    longer = config_in(tmp_path, train=settings | {"max_steps": 30})
    assert bind_run(longer, DATASET, make_plan()).max_steps == 30


def test_all_complaints_about_a_run_are_collected(tmp_path):
    model = {"attention": "infini", "segment_length": 8}
    bind_run(config_in(tmp_path, model=model), DATASET, make_plan())
    stage = {"sequence_length": 8, "until": 0.5}
    data = {"source": "python-stdlib", "sequence_length": 16, "curriculum": [stage]}
    table = {
        "row_table": "short",
        "row_table_digest": "same",
        "sequence_length": 8,
        "rows": 9,
    }
    changed = config_in(tmp_path, model=model, data=data, train={"seed": 1})
    with pytest.raises(ConfigError) as refused:
        bind_run(changed, make_dataset(curriculum=[table]), make_plan())
    first, second = refused.value.problems
    assert "train.seed: 1234 before, 1 now" in first and "dataset.curriculum" in first
    assert "data.curriculum has sequences of 8 tokens" in second


def test_a_larger_micro_batch_than_the_limit_is_reported(tmp_path, caplog):
    run, config = (
        RunFolder(tmp_path / "runs" / "mine"),
        config_in(tmp_path, train={"micro_batch_size": 8}),
    )
    lineage = bind_run(config, DATASET, make_plan(micro_batch_size=8))
    run.write(run.lineage, changed(lineage, micro_batch_limit=2))
    lineage = bind_run(config, DATASET, make_plan(micro_batch_size=2))
    assert lineage.micro_batch_limit == 2 and not caplog.text
    lineage = bind_run(config, DATASET, make_plan(micro_batch_size=8))
    assert (
        make_attempt(
            run.path, config, plan=make_plan(micro_batch_size=8), lineage=lineage
        ).micro_batch_size
        == 2
    )
    assert [record.args for record in caplog.records] == [(8, 2)]


def test_the_learning_rate_of_a_step_that_never_comes_is_not_reported(tmp_path, caplog):
    def messages(steps: int) -> str:
        caplog.clear()
        bind_run(
            config_in(tmp_path, train={"max_steps": steps, "warmup_steps": 1}),
            DATASET,
            make_plan(),
        )
        return caplog.text

    messages(20)
    add_checkpoint(RunFolder(tmp_path / "runs" / "mine").checkpoints, 10)
    assert "learning rate of step 11" in messages(11)
    assert "learning rate" not in messages(8)


@pytest.mark.parametrize(
    ("epochs", "steps"), [(1.1, 11), (1.11, 12), (0.001, 1), (3, 30)]
)
def test_epochs_are_counted_exactly(tmp_path, epochs, steps):
    train = {
        "num_epochs": epochs,
        "global_batch_size": 10,
        "micro_batch_size": 2,
        "warmup_steps": 0,
    }
    assert (
        bind_run(config_in(tmp_path, train=train), DATASET, make_plan()).max_steps
        == steps
    )


def test_a_profile_that_is_never_recorded_is_reported(tmp_path, caplog):
    run = RunFolder(tmp_path / "runs" / "mine")

    def warns(span: list[int]) -> bool:
        caplog.clear()
        train = {"max_steps": 20, "warmup_steps": 5, "profile_steps": span}
        bind_run(config_in(tmp_path, train=train), DATASET, make_plan())
        return "train.profile_steps" in caplog.text

    assert [warns(span) for span in ([21, 24], [20, 24], [5, 9])] == [
        True,
        False,
        False,
    ]
    add_checkpoint(run.checkpoints, 10)
    assert [warns(span) for span in ([5, 9], [5, 11])] == [True, False]
    (run.path / "profile").mkdir()
    assert not warns([5, 9])


def test_a_line_cut_short_costs_only_itself(tmp_path):
    run = RunFolder(tmp_path)
    append_attempt(run, AttemptRecord(attempt=1, kind="failed", code=70))
    with run.attempts.open("a") as file:
        file.write('{"attempt": 2, "mess')
    append_attempt(run, AttemptRecord(attempt=3, kind="failed", code=70))
    append_attempt(run, AttemptRecord(attempt=4, kind="failed", code=70))
    assert [record.attempt for record in read_attempts(run)] == [1, 3, 4]


def train_line(step: int) -> str:
    return json.dumps({"kind": "train", "step": step, "loss": 1.0}) + "\n"


DAMAGE = [
    b'{"step": 3, "lo\n',
    b"\0\0\0\0\n",
    b"\xff\xfe\n",
    b"[1,2]\n",
    b"3\n",
    b'{"kind": "train", "step": "3"}\n',
    b'{"kind": "train", "step": 3, "step_time": []}\n',
    b'{"kind": [], "step": 3}\n',
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda line: repr(line[:40]))
def test_a_damaged_line_of_metrics_is_named_and_skipped(tmp_path, caplog, damage):
    run = RunFolder(tmp_path)
    before, after = (
        "".join(map(train_line, (1, 2))).encode(),
        "".join(map(train_line, (4, 5, 6))).encode(),
    )
    run.metrics.write_bytes(before + damage + after)
    assert [line.step for line in read_metrics(run)] == [1, 2, 4, 5, 6]
    cut_metrics(run, 5, is_evaluation_due=False)
    assert run.metrics.read_text() == "".join(map(train_line, (1, 2, 4, 5)))
    assert f"{run.metrics}: line 3" in caplog.text


def test_the_line_that_a_kill_cut_short_is_removed_in_silence(tmp_path, caplog):
    run = RunFolder(tmp_path)
    run.metrics.write_text(train_line(1) + '{"step": 2, "lo')
    cut_metrics(run, 10, is_evaluation_due=False)
    assert run.metrics.read_text() == train_line(1) and not caplog.text
