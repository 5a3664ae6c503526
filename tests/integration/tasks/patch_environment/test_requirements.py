"""What a configuration names beyond the required packages, tried before any text is read."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.flows import pipeline as direct
from infini_llama.tasks.patch_environment import requirements
from infini_llama.tasks.patch_environment.doctor import doctor
from infini_llama.tasks.patch_environment.requirements import unmet
from support.machines import changed, settings


@pytest.fixture
def modules(tmp_path):
    """The setting by which workers find the user's modules: one that works, one that fails, and a wandb without a key."""
    (tmp_path / "mine.py").write_text("number = 3\ndef largest(model, record): return {}\n")
    (tmp_path / "failing.py").write_text("1 / 0\n")
    (tmp_path / "wandb.py").write_text(
        "import os\nfrom types import SimpleNamespace as Some\nMODE = os.environ.get('WANDB_MODE', 'online')\n"
        "def setup(): return Some(settings=Some(mode=MODE))\napi = Some(api_key=None)\n"
    )
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize("hook", ["failing:largest", "absent:largest", "mine:absent", "mine:number"])
def test_a_hook_that_cannot_be_used_is_named(modules, hook):
    config = settings({"env": modules}, {"metrics_hook": hook})
    assert [sentence.split(" ")[0] for sentence in unmet(config)] == [f"train.metrics_hook={hook}"]


def test_a_usable_fast_engine_is_not_refused(modules):
    train = {"metrics_hook": "mine:largest", "report_to": ["wandb"]}
    assert unmet(settings({"env": modules | {"WANDB_MODE": "offline"}}, train)) == []


def test_wandb_without_a_key_is_named(modules):
    (fault,) = unmet(settings({"env": modules}, {"report_to": ["wandb"]}))
    assert fault.startswith("train.report_to=wandb ") and "WANDB_MODE" in fault


def test_wandb_and_deepspeed_that_are_not_there_are_named(tmp_path):
    for name in ("wandb", "deepspeed"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    config = settings({"env": {"PYTHONPATH": str(tmp_path)}}, {"report_to": ["wandb"], "parallel": "deepspeed"})
    assert {sentence.split("=")[0] for sentence in unmet(config)} == {"train.report_to", "train.parallel"}
    assert unmet(changed(config, {"environment": config.environment.model_dump() | {"launcher": "srun"}})) == [], (
        "other machines' packages"
    )


def test_a_trial_that_does_not_answer_refuses_nothing(modules, monkeypatch):
    monkeypatch.setattr(requirements, "IMPORT_SECONDS", 0.001)
    assert unmet(settings({"env": modules}, {"metrics_hook": "absent:largest"})) == []


@pytest.fixture
def refused(tmp_path) -> PipelineConfig:
    data = {"source": "files", "files": [str(tmp_path / "*.txt")]}
    return PipelineConfig.model_validate(
        {"data": data, "train": {"metrics_hook": "absent:largest"}, "runtime": {"home": tmp_path / "home"}}
    )


def test_a_run_is_refused_before_its_text_is_read(refused, monkeypatch):
    monkeypatch.setattr(direct, "Preparation", None)
    with pytest.raises(ConfigError, match=r"train\.metrics_hook"):
        direct.run(refused)


def test_doctor_reports_it(refused, tmp_path):
    report = doctor(refused, tmp_path)
    assert report.exit_code == 64
    assert any("train.metrics_hook" in found.sentence for found in report.findings if found.severity == "error")
