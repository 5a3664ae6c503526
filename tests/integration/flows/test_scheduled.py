"""Overrides of a schedule: what a deployment keeps of them, and the run that comes of it."""

from types import SimpleNamespace

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import load_config
from infini_llama.flows import scheduled
from infini_llama.flows.deployments import read_deployment

OVERRIDES = ["runtime.name=nightly-{date}", "train.num_epochs=2", "data.tokenizer.vocab_size=300"]
FILE = """\
data: {source: python-stdlib}
deployment:
  schedules:
    - {name: nightly, cron: "0 2 * * *", overrides: ["runtime.name=nightly-{date}", "train.num_epochs=2", data.tokenizer.vocab_size=300]}
    - {name: plain, cron: "0 3 * * *"}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "small.yaml").write_text(FILE)
    return tmp_path / "small.yaml"


@pytest.mark.parametrize(("schedule", "overrides"), [("nightly", OVERRIDES), ("plain", []), (None, [])])
def test_a_run_of_a_schedule_has_its_overrides(file, monkeypatch, schedule, overrides):
    deployment = read_deployment(str(file))
    assert set(deployment.schedules) == {"nightly"}
    monkeypatch.setattr(scheduled, "_schedule_name", lambda run: schedule)
    monkeypatch.setattr(scheduled, "flow_run", SimpleNamespace(id="a"))
    monkeypatch.setattr(scheduled, "deployment", SimpleNamespace(id="b"))
    without = {"deployment"}
    config = scheduled.with_schedule(deployment.config, deployment.schedules)
    assert config.model_dump(exclude=without) == load_config(file, overrides).model_dump(exclude=without)


@pytest.mark.parametrize(
    ("old", "new"), [('"0 2 * * *"', '"99 2 * * *"'), ("num_epochs=2", "nonsense=2"), ("num_epochs=2", "num_epochs=0")]
)
def test_a_wrong_schedule_is_refused_before_any_server_is_asked(file, old, new):
    file.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError):
        read_deployment(str(file))
