"""A user's mistakes that are found at the start of an attempt end before its first step."""

import contextlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig, PipelineConfig
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.machine import Cpu, MachineFacts
from infini_llama.tasks.records.plan import EnvironmentRecord, PlannedEnvironment
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.run_folder import RunFolder, append_attempt
from infini_llama.tasks.train import stage
from infini_llama.tasks.train.planning import plan_attempt
from infini_llama.tasks.train.worker.callbacks.metrics_writer import reporters
from support.made_up_runs import add_checkpoint, make_run
from support.records import make_dataset, make_lineage, make_plan

INFINI = {"attention": "infini", "segment_length": 32}
CPU = MachineFacts(python="3.11", cpu=Cpu(model="x"), cores=2, versions={}, gpus=())


def planned(
    home: Path,
    invocation: str = "a",
    resume: str = "auto",
    hidden_size: int = 64,
    max_steps: int = 1000,
    curriculum: Sequence[object] = (),
    **changes: object,
) -> AttemptPlan:
    """The next attempt of a command at the run `mine`."""
    model = {
        "hidden_size": hidden_size,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "attention": "infini" if changes else "softmax",
        **changes,
    }
    runtime = {"home": str(home), "name": "mine", "resume": resume}
    train = {"max_steps": max_steps, "warmup_steps": 1}
    config = parse_config(
        {
            "data": {"source": "python-stdlib", "curriculum": list(curriculum)},
            "model": model,
            "train": train,
            "runtime": runtime,
        }
    )
    lineage = make_lineage(config, make_dataset())
    return plan_attempt(
        config, make_dataset(), make_plan(), lineage, invocation, verify_on_read=False
    )


def replanned(attempt: AttemptPlan) -> AttemptPlan:
    """The attempt of the next command with the same configuration."""
    return plan_attempt(
        attempt.config,
        attempt.dataset,
        attempt.plan,
        attempt.lineage,
        "next",
        verify_on_read=False,
    )


def test_workers_that_share_sequences_come_in_whole_groups(caplog):
    sections = {
        "train": {"context_parallel": 2},
        "model": INFINI,
        "environment": {"device": "cpu"},
    }
    config = parse_config({"data": {"source": "python-stdlib"}} | sections)
    plan = plan_environment(config, CPU)
    assert plan.nproc_per_node == 2
    for count, kept in (
        (3, 2),
        (4, 4),
    ):  # 32 sequences are two micro-batches of eight for two groups of two
        pinned = changed(plan.pinned(), nproc_per_node=count)
        assert plan_environment(config, CPU, pinned).nproc_per_node == kept
    assert caplog.text.count("train.context_parallel=2, but 3 worker(s)") == 1


def test_a_refused_checkpoint_of_another_run_is_refused_again(tmp_path):
    theirs = add_checkpoint(
        tmp_path / "theirs", 7, model={"hidden_size": 64}, world_size=1
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"model\.hidden_size: 64 .* 128 "):
            planned(tmp_path, resume=str(theirs), hidden_size=128)
        attempt = planned(tmp_path, resume=str(theirs))
        assert (
            attempt.resume_from,
            attempt.from_step,
            attempt.lineage.resumed_from,
        ) == (
            theirs,
            7,
            str(theirs),
        )


def test_a_pointer_of_another_run_that_moves_does_not_move_this_run(tmp_path):
    """Until this run has a checkpoint of its own, also one that was killed before its first save."""
    theirs = add_checkpoint(
        tmp_path / "theirs", 7, model={"hidden_size": 64}, world_size=1
    )
    pointer = str(theirs.parent / "latest")
    first = planned(tmp_path, resume=pointer)
    assert first.resume_from == theirs
    later = add_checkpoint(
        tmp_path / "theirs", 9, model={"hidden_size": 64}, world_size=1
    )
    again = replanned(first)
    assert (again.resume_from, again.from_step) == (theirs, 7)
    assert planned(tmp_path, resume=pointer).resume_from == later, "another run"


def test_a_checkpoint_of_a_version_without_maps_has_none(tmp_path):
    theirs = add_checkpoint(
        tmp_path / "theirs", 7, model={"hidden_size": 64}, world_size=1
    )
    with pytest.raises(
        ConfigError, match=r"model\.memory_maps: False there, True here"
    ):
        planned(tmp_path, resume=str(theirs), memory_maps=True)
    with pytest.raises(
        ConfigError, match=r"attend_previous_segment: False there, True here"
    ):
        planned(tmp_path, resume=str(theirs), attend_previous_segment=True)


def test_a_checkpoint_of_another_dataset(tmp_path, caplog):
    add_checkpoint(
        RunFolder(tmp_path / "runs" / "mine").checkpoints,
        7,
        world_size=1,
        dataset="other",
    )
    with pytest.raises(
        DataError, match=r"another dataset \(other\) than this run \(same\)"
    ):
        planned(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    theirs = add_checkpoint(tmp_path / "theirs", 7, world_size=1, dataset="other")
    assert planned(tmp_path, resume=str(theirs)).from_step == 7
    assert "another dataset (other) than this run (same)" in caplog.text, "it was named"


def test_a_curriculum_after_a_checkpoint_of_other_global_batches(tmp_path):
    """Its stages are named by steps, and are chosen by samples."""
    stages = [{"sequence_length": 128, "until": 20}]
    for name, samples in (
        ("theirs", 7 * 8),
        ("alike", 7 * 32),
        ("rolled-back", 9 * 32),
    ):
        theirs = add_checkpoint(tmp_path / name, 7, world_size=1, samples=samples)
        assert planned(tmp_path, resume=str(theirs)).from_step == 7
        if name == "alike":
            assert planned(tmp_path, resume=str(theirs), curriculum=stages)
            continue
        with pytest.raises(ConfigError, match=r"global_batch_size.* or a rollback"):
            planned(tmp_path, resume=str(theirs), curriculum=stages)


def test_a_checkpoint_after_which_nothing_is_trained(tmp_path, caplog):
    theirs = add_checkpoint(tmp_path / "theirs", 7, model={}, world_size=1)
    for max_steps in (5, 7):
        with pytest.raises(ConfigError, match=r"train\.max_steps"):
            planned(tmp_path, resume=str(theirs), max_steps=max_steps)
    assert planned(tmp_path, resume=str(theirs), max_steps=8).from_step == 7
    add_checkpoint(
        RunFolder(tmp_path / "runs" / "mine").checkpoints, 7, model={}, world_size=1
    )
    assert planned(tmp_path, max_steps=7).from_step == 7 and not caplog.text, (
        "killed after its last save"
    )
    assert planned(tmp_path, max_steps=5).from_step == 7 and "step 7" in caplog.text


def test_runtime_resume_applies_to_the_first_attempt_of_each_command(tmp_path):
    run = RunFolder(tmp_path / "runs" / "mine")
    own = add_checkpoint(run.checkpoints, 7, model={}, world_size=1)
    append_attempt(
        run, AttemptRecord(attempt=1, invocation="a", kind="failed", code=70)
    )
    attempt = planned(tmp_path, "a", "never")
    assert (attempt.resume_from, attempt.from_step) == (own, 7), "it was saved since"
    with pytest.raises(ConfigError, match=r"runtime\.resume=never"):
        planned(tmp_path, "b", "never")


def test_a_finished_run_that_is_taken_back_has_settings_and_environment_of_the_command(
    tmp_path, monkeypatch
):
    dataset, data = make_dataset(), DataConfig(source="python-stdlib")
    run = RunFolder(make_run(tmp_path, dataset, data))
    plan, attempts = make_plan(), list[AttemptPlan]()
    record = EnvironmentRecord(
        plan=plan,
        facts=CPU,
        pinned=plan.pinned(),
        pinned_at="2026-01-01T00:00:00+00:00",
    )
    run.write(run.environment, record)
    monkeypatch.setattr(
        stage,
        "attempts_until_finished",
        lambda attempt, locked: attempts.append(attempt),
    )
    monkeypatch.setattr(stage, "write_summary", lambda run: None)
    for resume, steps, rate, cores in (
        ("auto", 60, 1e-3, 2),
        (str(run.checkpoints / "step-00000020"), 40, 1e-4, 4),
    ):
        runtime = {"name": run.path.name, "home": str(tmp_path), "resume": resume}
        train = {"max_steps": 40, "warmup_steps": 5, "learning_rate": 1e-4}
        config = PipelineConfig.model_validate(
            {"data": data, "train": train, "runtime": runtime}
        )
        planned = PlannedEnvironment(
            plan=plan, record=changed(record, facts=changed(CPU, cores=4))
        )
        is_refused = resume == "auto"
        refusal = pytest.raises(
            ConfigError, match=r"finished at step 60[\s\S]*learning_rate"
        )
        with refusal if is_refused else contextlib.nullcontext():
            stage.train(config, dataset, planned, "a")
        lineage, environment = (
            run.require_lineage(),
            run.read(EnvironmentRecord, run.environment),
        )
        assert (
            lineage.max_steps,
            lineage.train.learning_rate,
            environment.facts.cores,
        ) == (
            steps,
            rate,
            cores,
        )
    assert [attempt.from_step for attempt in attempts] == [20]
    files = (run.lineage, run.environment, run.config)
    before = [path.read_bytes() for path in files]
    runtime |= {"resume": str(run.checkpoints / "mistyped")}
    config = PipelineConfig.model_validate(
        {"data": data, "train": train | {"learning_rate": 0.5}, "runtime": runtime}
    )
    with pytest.raises(ConfigError, match="mistyped"):
        stage.train(config, dataset, PlannedEnvironment(plan=plan, record=record), "b")
    assert [path.read_bytes() for path in files] == before, "it was refused"


@pytest.mark.parametrize("resume", ["must", "a/mistyped/path"])
def test_a_run_that_is_refused_before_its_first_attempt_leaves_its_name_to_other_settings(
    tmp_path, monkeypatch, resume
):
    plan, attempts = make_plan(), list[AttemptPlan]()
    record = EnvironmentRecord(
        plan=plan,
        facts=CPU,
        pinned=plan.pinned(),
        pinned_at="2026-01-01T00:00:00+00:00",
    )
    monkeypatch.setattr(
        stage,
        "attempts_until_finished",
        lambda attempt, locked: attempts.append(attempt),
    )
    monkeypatch.setattr(stage, "write_summary", lambda run: None)

    def train(resume: str, seed: int) -> None:
        runtime = {"name": "mine", "home": str(tmp_path), "resume": resume}
        config = parse_config(
            {
                "data": {"source": "python-stdlib"},
                "train": {"seed": seed},
                "runtime": runtime,
            }
        )
        stage.train(
            config, make_dataset(), PlannedEnvironment(plan=plan, record=record), "a"
        )

    with pytest.raises(ConfigError, match=rf"runtime\.resume=.*{resume}"):
        train(resume, 1)
    run = RunFolder(tmp_path / "runs" / "mine")
    assert run.read_lineage() is None and not run.environment.exists(), (
        "no setting is pinned"
    )
    train("auto", 2)
    assert [attempt.config.train.seed for attempt in attempts] == [2]


def test_a_reporter_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"infini-llama\[wandb\]"):
        reporters(["wandb"], tmp_path, 0, {}, longest_wait=60)


def test_a_reporter_that_fails_is_left_out_from_the_first_step_on(
    tmp_path, monkeypatch, caplog
):
    broken = SimpleNamespace()  # as a TensorBoard for another protobuf
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", broken)
    assert reporters(["tensorboard"], tmp_path, 0, {}, longest_wait=60) == []
    assert "reporting to TensorBoard failed" in caplog.text
