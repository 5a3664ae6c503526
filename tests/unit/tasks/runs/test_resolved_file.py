"""resolved.json: what the workers of an attempt are given."""

from infini_llama.configs.schema import DataConfig, EnvironmentConfig, PipelineConfig
from infini_llama.tasks.runs.run_folder import read_resolved, resolved_path, write_resolved
from support.records import make_plan, make_resolved


def test_a_resolved_run_is_read_as_it_was_written_without_its_secrets(tmp_path):
    env = {"OMP_NUM_THREADS": "2", "WANDB_API_KEY": "sesame"}
    config = PipelineConfig(data=DataConfig(source="python-stdlib"), environment=EnvironmentConfig(env=env))
    resolved = make_resolved(tmp_path, config, plan=make_plan(env=env), resume_from=tmp_path / "step-1")
    write_resolved(tmp_path, resolved)
    assert "sesame" not in resolved_path(tmp_path).read_text()
    found = read_resolved(tmp_path)
    assert found.plan.env == found.config.environment.env == env | {"WANDB_API_KEY": "***"}
    masked = {"plan": resolved.plan, "config": resolved.config}
    assert found.model_copy(update=masked) == resolved
