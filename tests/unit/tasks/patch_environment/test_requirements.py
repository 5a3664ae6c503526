"""What a configuration names beyond the required packages, tried before any text is read."""

import json
import resource

import pytest

from infini_llama.tasks.patch_environment import requirements
from infini_llama.tasks.patch_environment.requirements import check_requirements, unmet
from support.machines import settings


def test_nothing_is_started_where_nothing_is_named(monkeypatch):
    monkeypatch.setattr(requirements.subprocess, "run", None)
    assert unmet(settings()) == []


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"train_batch_size": 7}), None])
def test_deepspeeds_file_is_checked(tmp_path, monkeypatch, content):
    monkeypatch.setattr(requirements, "_imports", lambda config: [])
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    (fault,) = unmet(settings({}, {"parallel": "deepspeed", "deepspeed_config": str(path)}))
    assert "train.deepspeed_config" in fault


def test_too_few_open_files_are_named(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (20, 20))
    (fault,) = unmet(settings())
    assert "ulimit -n" in fault


def test_the_check_passes_for_a_plain_configuration():
    check_requirements(settings())
