"""A run keeps the settings it began with; what cannot be kept is logged."""

import errno
import os
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.reading import changed
from infini_llama.tasks.patch_environment import stage
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.patch_environment.stage import patch_environment
from infini_llama.tasks.runs.run_folder import RunFolder, write_attempt_plan
from support.machines import H100, begun, in_home, reason_of, record_of, settings
from support.records import make_attempt


def change_record(home, part, values) -> None:
    folder, record = RunFolder(home / "runs/run"), record_of(home)
    folder.write(
        folder.environment,
        changed(record, **{part: changed(getattr(record, part), **values)}),
    )


@pytest.fixture(scope="module")
def gpus_4(tmp_path_factory):
    facts = probe(tmp_path_factory.mktemp("home"))
    return changed(facts, cores=8, gpus=[H100] * 4, nccl=True)


def test_the_plan_is_pinned_and_followed(tmp_path, caplog):
    first = begun(settings({"threads": 3}), tmp_path, "run")
    caplog.clear()
    again = begun(settings(), tmp_path, "run")  # "auto" now, so the pin decides
    assert again.threads == first.threads == 3
    assert "pinned" in reason_of(again, "threads")
    record = record_of(tmp_path)
    assert (
        record.plan.threads == record.pinned.threads == 3
        and record.facts.versions["torch"]
    )
    assert "bitwise" not in caplog.text


def test_a_refused_command_does_not_change_the_pinned_plan(tmp_path):
    """Nothing is written before training has the run."""
    begun(settings({"threads": 3}), tmp_path, "run")
    before = record_of(tmp_path)
    other = patch_environment(in_home(settings({"threads": 1}), tmp_path)).plan
    assert other.threads == 1 and record_of(tmp_path) == before
    assert begun(settings(), tmp_path, "run").threads == 3


def test_the_vocabulary_decides_the_loss_chunk_until_it_is_pinned(tmp_path):
    first = begun(settings(), tmp_path, "run", vocab_size=128_256)
    assert first.loss_chunk == record_of(tmp_path).pinned.loss_chunk == 256
    assert begun(settings(), tmp_path, "run", vocab_size=300).loss_chunk == 256
    assert begun(settings(), tmp_path, "other", vocab_size=300).loss_chunk == 0


def test_the_time_of_the_pin_and_the_environment_of_this_process_stay(tmp_path):
    before = dict(os.environ)
    begun(settings({"env": {"MINE": "1"}}), tmp_path, "run")
    folder = RunFolder(tmp_path / "runs/run")
    folder.write(
        folder.environment,
        changed(record_of(tmp_path), pinned_at="2020-01-01T00:00:00+00:00"),
    )
    begun(settings(), tmp_path, "run")
    assert (
        record_of(tmp_path).pinned_at == "2020-01-01T00:00:00+00:00"
        and dict(os.environ) == before
    )


def test_leaving_the_pinned_plan_is_reported(tmp_path, caplog):
    begun(settings({"threads": 1}), tmp_path, "run")
    caplog.clear()
    assert begun(settings({"threads": 2}), tmp_path, "run").threads == 2
    assert "threads was 1 " in caplog.text and "no longer bitwise" in caplog.text
    assert record_of(tmp_path).pinned.threads == 2, (
        "what the user asks for is the pin from now on"
    )


def test_a_plan_that_the_machine_cannot_follow_is_reported_and_kept(tmp_path, caplog):
    begun(settings(), tmp_path, "run")
    change_record(tmp_path, "pinned", {"device": "cuda", "precision": "bf16"})
    for _ in range(2):
        caplog.clear()
        assert begun(settings(), tmp_path, "run").device == "cpu"
        assert "device was cuda" in caplog.text
    assert record_of(tmp_path).pinned.device == "cuda", (
        "with the GPU back, the run goes back to it"
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"python": "3.9.1"}, "python was 3.9.1 "),
        ({"cpu": {"model": "abacus", "bf16": False, "amx": False}}, "abacus"),
        ({"versions": {"torch": "1.0", "numpy": "1.0"}}, "torch was 1.0"),
        ({"gpus": [{"name": "T4"}]}, "['T4']"),
    ],
)
def test_other_hardware_and_versions_are_reported_once(tmp_path, caplog, facts, words):
    begun(settings(), tmp_path, "run")
    change_record(tmp_path, "facts", facts)
    caplog.clear()
    begun(settings(), tmp_path, "run")
    assert words in caplog.text and "bitwise" in caplog.text
    caplog.clear()
    begun(settings(), tmp_path, "run")
    assert "bitwise" not in caplog.text


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"pinned": {}, "plan": {}, "facts": {}, "pinned_at": 0}'],
)
def test_a_damaged_record_is_reported_and_rewritten(tmp_path, caplog, text):
    path = tmp_path / "runs/run/environment.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert begun(settings(), tmp_path, "run").device
    assert str(path) in caplog.text and record_of(tmp_path).pinned.device


def test_without_its_record_a_run_keeps_the_plan_of_its_newest_attempt(
    tmp_path, caplog
):
    first = begun(settings({"threads": 3}), tmp_path, "run")
    run = RunFolder(tmp_path / "runs/run")
    folder = run.path / "logs" / "attempt-01"
    folder.mkdir(parents=True)
    write_attempt_plan(folder, make_attempt(run.path, plan=first))
    run.environment.unlink()
    assert (
        begun(settings(), tmp_path, "run").threads
        == record_of(tmp_path).pinned.threads
        == 3
    )
    assert (
        "environment.json is missing or damaged; the settings of attempt-01 are kept"
        in caplog.text
    )


def test_secrets_reach_the_workers_but_not_the_record(tmp_path):
    env = {"WANDB_API_KEY": "abc123", "DATABASE_URL": "abc123", "NCCL_DEBUG": "INFO"}
    plan = begun(settings({"env": env}), tmp_path, "run")
    assert plan.env["WANDB_API_KEY"] == "abc123"
    assert "abc123" not in (tmp_path / "runs/run/environment.json").read_text()
    assert record_of(tmp_path).plan.env["NCCL_DEBUG"] == "INFO"


def test_the_part_of_a_pin_that_can_be_followed_is(gpus_4, caplog):
    pinned = plan_environment(settings({"threads": 3}), gpus_4).pinned()
    assert (pinned.nproc_per_node, pinned.precision, pinned.threads) == (4, "bf16", 3)
    plan = plan_environment(settings(), changed(gpus_4, gpus=[H100] * 2), pinned)
    assert (plan.device, plan.nproc_per_node, plan.precision, plan.threads) == (
        "cuda",
        2,
        "bf16",
        4,  # two workers share the cores, not four
    )
    assert (
        caplog.text.count("cannot use the run's original plan") == 1
        and "nproc_per_node=4" in caplog.text
    )


def test_a_run_that_began_without_gpus_stays_there_and_notes_them(gpus_4):
    pinned = plan_environment(settings(), changed(gpus_4, gpus=[])).pinned()
    plan = plan_environment(
        settings({"nproc_per_node": 8}, {"micro_batch_size": 4}), gpus_4, pinned
    )
    assert plan.device == "cpu" and any(
        "environment.device=cuda" in found.sentence for found in plan.findings
    )


def test_another_requested_device_makes_a_new_plan(gpus_4):
    pinned = plan_environment(settings({"threads": 8}), gpus_4).pinned()
    plan = plan_environment(settings({"device": "cpu"}), gpus_4, pinned)
    assert (plan.device, plan.nproc_per_node, plan.precision) == (
        "cpu",
        1,
        "bf16" if gpus_4.cpu.bf16 else "fp32",
    )


def test_a_wrong_configuration_is_refused_with_a_pin_too(gpus_4, caplog):
    pinned = plan_environment(settings(), gpus_4).pinned()
    with pytest.raises(ConfigError, match="nproc_per_node=5"):
        plan_environment(
            settings({"nproc_per_node": 5}, {"global_batch_size": 40}), gpus_4, pinned
        )
    assert not caplog.text


def test_a_disk_that_is_full_or_cannot_be_written_ends_the_stage(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"runtime\.home=/proc/x"):
        patch_environment(in_home(settings(), Path("/proc/x")))
    full = changed(
        probe(tmp_path),
        disk={"path": "/d", "free": 0, "fault": os.strerror(errno.ENOSPC)},
    )
    monkeypatch.setattr(stage, "probe", lambda home, config, machine: full)
    with pytest.raises(PipelineError, match="space") as raised:
        patch_environment(in_home(settings(), tmp_path))
    assert raised.value.exit_code == 70
