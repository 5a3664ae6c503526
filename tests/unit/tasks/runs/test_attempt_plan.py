"""plan.json: what the workers of an attempt are given."""

from infini_llama.configs.schema import DataConfig, EnvironmentConfig, PipelineConfig
from infini_llama.tasks.runs.run_folder import (
    attempt_plan_path,
    read_attempt_plan,
    write_attempt_plan,
)
from support.records import make_attempt, make_plan


def test_a_resolved_run_is_read_as_it_was_written_without_its_secrets(tmp_path):
    env = {"OMP_NUM_THREADS": "2", "WANDB_API_KEY": "sesame"}
    config = PipelineConfig(
        data=DataConfig(source="python-stdlib"), environment=EnvironmentConfig(env=env)
    )
    attempt = make_attempt(
        tmp_path, config, plan=make_plan(env=env), resume_from=tmp_path / "step-1"
    )
    write_attempt_plan(tmp_path, attempt)
    assert "sesame" not in attempt_plan_path(tmp_path).read_text()
    found = read_attempt_plan(tmp_path)
    assert (
        found.plan.env == found.config.environment.env == env | {"WANDB_API_KEY": "***"}
    )
    masked = {"plan": attempt.plan, "config": attempt.config}
    assert found.model_copy(update=masked) == attempt
