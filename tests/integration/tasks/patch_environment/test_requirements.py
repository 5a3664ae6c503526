"""What a configuration names beyond the required packages, tried before any text is read."""

import json
import resource

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import PipelineConfig
from infini_llama.flows import pipeline as direct
from infini_llama.tasks.patch_environment import requirements
from infini_llama.tasks.patch_environment.doctor import doctor
from infini_llama.tasks.patch_environment.requirements import check_requirements, unmet
from support.machines import settings


@pytest.fixture
def modules(tmp_path):
    """The setting by which workers find the user's modules: one that works, one that fails, and a wandb without a key."""
    (tmp_path / "mine.py").write_text(
        "number = 3\ndef largest(model, record): return {}\n"
    )
    (tmp_path / "failing.py").write_text("1 / 0\n")
    (tmp_path / "wandb.py").write_text(
        "import os\nfrom types import SimpleNamespace as Some\nMODE = os.environ.get('WANDB_MODE', 'online')\n"
        "def setup(): return Some(settings=Some(mode=MODE))\napi = Some(api_key=None)\n"
    )
    return {"PYTHONPATH": str(tmp_path)}


def test_a_plain_configuration_starts_no_process(monkeypatch):
    monkeypatch.setattr(requirements.subprocess, "run", None)
    check_requirements(settings())


@pytest.mark.parametrize(
    "hook", ["failing:largest", "absent:largest", "mine:absent", "mine:number"]
)
def test_a_hook_that_cannot_be_used_is_named(modules, hook):
    config = settings({"env": modules}, {"metrics_hook": hook})
    assert [sentence.split(" ")[0] for sentence in unmet(config)] == [
        f"train.metrics_hook={hook}"
    ]


def test_a_hook_and_wandb_offline_that_can_be_used_are_not_refused(modules):
    train = {"metrics_hook": "mine:largest", "report_to": ["wandb"]}
    assert unmet(settings({"env": modules | {"WANDB_MODE": "offline"}}, train)) == []


def test_wandb_without_a_key_is_named(modules):
    (fault,) = unmet(settings({"env": modules}, {"report_to": ["wandb"]}))
    assert fault.startswith("train.report_to=wandb ") and "WANDB_MODE" in fault


def test_missing_wandb_and_deepspeed_are_named_for_local_workers(tmp_path):
    for name in ("wandb", "deepspeed"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    config = settings(
        {"env": {"PYTHONPATH": str(tmp_path)}},
        {"report_to": ["wandb"], "parallel": "deepspeed"},
    )
    assert {sentence.split("=")[0] for sentence in unmet(config)} == {
        "train.report_to",
        "train.parallel",
    }
    assert (
        unmet(changed(config, environment=changed(config.environment, launcher="srun")))
        == []
    ), "other machines' packages"


def test_an_import_that_takes_too_long_refuses_nothing(modules, monkeypatch):
    monkeypatch.setattr(requirements, "IMPORT_SECONDS", 0.001)
    assert unmet(settings({"env": modules}, {"metrics_hook": "absent:largest"})) == []


@pytest.mark.parametrize(
    "content", ["{", "[]", json.dumps({"train_batch_size": 7}), None]
)
def test_deepspeeds_file_is_checked(tmp_path, content):
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    (tmp_path / "deepspeed.py").touch()
    environment = {"env": {"PYTHONPATH": str(tmp_path)}}
    (fault,) = unmet(
        settings(environment, {"parallel": "deepspeed", "deepspeed_config": str(path)})
    )
    assert "train.deepspeed_config" in fault


@pytest.mark.parametrize(
    ("kind", "limit", "option"), [("NOFILE", 20, "-n"), ("AS", 10**9, "-v")]
)
def test_too_few_open_files_or_addresses_are_named(monkeypatch, kind, limit, option):
    limits = {getattr(resource, f"RLIMIT_{kind}"): (limit, limit)}
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda which: limits.get(which, (resource.RLIM_INFINITY,) * 2),
    )
    with pytest.raises(ConfigError) as refused:
        check_requirements(settings())
    (fault,) = refused.value.problems
    assert f"ulimit {option}" in fault and not unmet(settings()), (
        "doctor has it among its findings"
    )


def test_a_run_is_refused_before_its_text_is_read_and_doctor_reports_why(
    tmp_path, monkeypatch
):
    data = {"source": "files", "files": [str(tmp_path / "*.txt")]}
    refused = PipelineConfig.model_validate(
        {
            "data": data,
            "train": {"metrics_hook": "absent:largest"},
            "runtime": {"home": tmp_path / "home"},
        }
    )
    monkeypatch.setattr(direct, "Preparation", None)
    with pytest.raises(ConfigError, match=r"train\.metrics_hook"):
        direct.run(refused)
    report = doctor(refused, tmp_path)
    assert report.exit_code == 64
    assert any(
        "train.metrics_hook" in finding.sentence
        for finding in report.findings
        if finding.severity == "error"
    )
