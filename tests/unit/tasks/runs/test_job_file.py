"""job.json: what the workers of an attempt are given, also as older versions wrote it."""

from pathlib import Path

import support
from infini_llama.configs.schema import DataConfig, EnvironmentConfig, PipelineConfig
from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.runs.job_file import job_path, read_job, read_start, write_job
from support.made_up_runs import LINEAGE
from support.records import make_job, make_plan

OLDER = Path(next(iter(support.__path__))) / "older_run" / "logs" / "attempt-01"


def test_a_job_is_read_as_it_was_written_without_its_secrets(tmp_path):
    env = {"OMP_NUM_THREADS": "2", "WANDB_API_KEY": "sesame"}
    config = PipelineConfig(data=DataConfig(source="python-stdlib"), environment=EnvironmentConfig(env=env))
    lineage = Lineage.from_json(LINEAGE)
    job = make_job(tmp_path, config=config, plan=make_plan(env=env), lineage=lineage, resume_from=tmp_path / "step-1")
    write_job(tmp_path, job)
    assert "sesame" not in job_path(tmp_path).read_text()
    found = read_job(tmp_path)
    assert found.plan.env == found.config.environment.env == env | {"WANDB_API_KEY": "***"}
    masked = {"plan": job.plan, "config": job.config}
    assert found.model_copy(update=masked) == job
    assert found.lineage is not None and found.lineage.to_json() == LINEAGE, "what was never set is not compared later"
    assert read_start(tmp_path).started == job.started
