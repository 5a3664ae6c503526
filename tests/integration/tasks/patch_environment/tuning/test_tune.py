"""What tuning believes, what it chooses, and what it leaves out for want of time."""

import os

import pytest

from infini_llama.tasks.patch_environment.planning.plan import resolve
from infini_llama.tasks.patch_environment.tuning import trials
from infini_llama.tasks.patch_environment.tuning.trials import TrialFailed
from support.machines import case as case
from support.machines import changed


def test_an_attention_backend_is_tried_before_use(case, tmp_path, monkeypatch):
    """flash2 is here a package that can be imported and computes something else; flash4 fails when it is called."""
    package = tmp_path / "site" / "flash_attn"
    (package / "cute").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "def flash_attn_varlen_func(q, k, v, *a, **o): return q + 0 * (k.sum() + v.sum())\n"
    )
    (package / "cute" / "__init__.py").write_text(
        "def flash_attn_varlen_func(*a, **o): raise OSError('no kernel image')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    config, facts = case({"precision": "bf16"})
    found = trials.attention(config, resolve(config, facts), ["sdpa", "blocked", "flash2", "flash4"], 240)
    assert found["sdpa"].seconds > 0 and found["blocked"].difference < 0.03
    assert "differs" in found["flash2"].error and "no kernel image" in found["flash4"].error


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_steps_are_timed_under_the_plan(case, workers):
    config, facts = case({"nproc_per_node": workers, "threads": 1})
    measured = trials.steps(config, resolve(config, facts), seconds=0.1, limit=240)
    micro_batches = 2  # of a step, where the run's have several
    assert measured.tokens_per_second == pytest.approx(workers * micro_batches * 2 * 64 / measured.step)


def test_a_trial_that_fails_or_hangs_reports_the_cause_and_leaves_nothing(case):
    config, facts = case()
    plan = resolve(config, facts)
    with pytest.raises(TrialFailed, match="nonsense"):
        trials.steps(config, changed(plan, {"attention_backend": "nonsense"}), seconds=0.1, limit=240)
    with pytest.raises(TrialFailed, match="more than 0 s"):
        trials.steps(config, plan, seconds=0.1, limit=0.2)
