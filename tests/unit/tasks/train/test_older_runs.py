"""The folder of a run that an earlier version wrote opens with its records; what a key's change means is stated by the schema."""

import json
import shutil
from pathlib import Path

import pytest

import support
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import DataConfig, ModelConfig, PipelineConfig, TrainingConfig
from infini_llama.configs.schema.section import Resume, resume_policies
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.patch_environment.planning.pin import EXACT
from infini_llama.tasks.records.status import RankError
from infini_llama.tasks.runs.record import RunRecord
from infini_llama.tasks.runs.run_folder import RunFolder, attempts
from infini_llama.tasks.train.adapt import roll_back
from infini_llama.tasks.train.lineage import claim
from infini_llama.tasks.train.stage import finished
from support.made_up_runs import add_checkpoint
from support.records import make_dataset

OLDER = Path(next(iter(support.__path__))) / "older_run"


@pytest.fixture
def run(tmp_path) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / "tiny_infini")
    shutil.copytree(OLDER, run.path)
    add_checkpoint(run, 250, 4.5)
    return run


def test_an_older_run_opens_and_is_finished(run):
    record = RunRecord(run.path)
    assert (record.max_steps, record.lineage.dataset.sequence_length) == (250, 256)
    assert [(one.attempt, one.kind, one.from_step) for one in attempts(run)] == [(1, "done", 0)]
    assert record.goodput.start_up > 0 and record.goodput.wall > 0
    summary = finished(run, 250, None)
    assert summary is not None and summary.goodput.training > 0
    assert summary.paths.run == run.path, "where it is now"
    assert finished(run, 300, None) is None


def claimed(run: RunFolder, **changes: object) -> None:
    lineage = run.require_lineage()
    dataset = make_dataset(**lineage.dataset.model_dump(exclude={"weights", "curriculum"}))
    config = PipelineConfig.model_validate({"data": {"source": "python-stdlib"}})
    claim(run, config, lineage.train | changes, LlamaConfig.from_dict(lineage.model), dataset)


def test_an_older_run_is_continued_by_the_policies_of_the_schema(run, caplog):
    claimed(run)
    caplog.clear()  # it has no checksum
    claimed(run, log_every=3, save_every=7)
    assert not caplog.text
    claimed(run, learning_rate=0.5)
    assert "train.learning_rate: " in caplog.text and "0.5 now" in caplog.text
    with pytest.raises(ConfigError, match=r"train.seed: 1234 before, 7 now"):
        claimed(run, seed=7)


def test_skipped_samples_of_an_older_run_stay_skipped(run):
    fields = json.loads(run.lineage.read_text()) | {"left_out": [{"first": 8, "end": 16}]}
    run.lineage.write_text(json.dumps(fields))
    assert [(one.first, one.end) for one in run.require_lineage().skipped_samples] == [(8, 16)]
    assert roll_back(run, RankError(type="Diverged", first_skip=3, samples=40), limit=2)
    assert [(one.first, one.end) for one in run.require_lineage().skipped_samples] == [(8, 16), (0, 40)]


def test_every_key_that_a_run_is_bound_to_states_its_policy():
    train = resume_policies(TrainingConfig)
    assert set(train) == set(TrainingConfig.model_fields)
    fixed = {name for name, policy in train.items() if policy is Resume.FIXED}
    assert fixed == {"seed", "global_batch_size", "prefer_long_documents", "init_from"}
    assert set(resume_policies(ModelConfig).values()) == {Resume.FIXED}
    assert resume_policies(DataConfig)["num_workers"] is Resume.FREE


def test_pinned_settings_are_exact_in_the_schema():
    policies = resume_policies(TrainingConfig) | resume_policies(PipelineConfig.model_fields["environment"].annotation)
    assert {policies[name] for name in EXACT} == {Resume.EXACT}
