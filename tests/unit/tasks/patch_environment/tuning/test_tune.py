"""What tuning believes, what it chooses, and what it leaves out for want of time."""

import pytest

from infini_llama.model import backends, flash
from infini_llama.tasks.patch_environment.planning.pin import with_settings
from infini_llama.tasks.patch_environment.tuning import attention_trial, trials
from infini_llama.tasks.patch_environment.tuning.trials import StepTiming, TrialFailed
from infini_llama.tasks.patch_environment.tuning.tune import tune
from infini_llama.tasks.records.environment import Trial
from support.machines import H100, begun, changed, lay_out
from support.machines import case as case


def speeds(monkeypatch, speed, attention=None):
    """Replaces the clock's readings: a trial takes as long as `speed` of its plan says."""
    tried = []

    def steps(config, plan, seconds, limit):
        tried.append(plan)
        fast = speed(plan)
        if isinstance(fast, str):
            raise TrialFailed(fast)
        return StepTiming(tokens_per_second=fast, step=1000 / fast, first=30.0)

    monkeypatch.setattr(trials, "steps", steps)
    timed = {name: Trial(tried=name, seconds=taken) for name, taken in (attention or {"sdpa": 1.0}).items()}
    monkeypatch.setattr(trials, "attention", lambda *arguments: timed)
    return tried


def test_faster_settings_are_chosen_and_failing_ones_are_not(case, tmp_path, monkeypatch):
    def speed(plan):
        if plan.compile == "whole":
            return "a kernel is wrong"
        workers = 1.5 if plan.nproc_per_node == 8 else 1.0
        return 100 * workers * (1.03 if plan.precision == "fp32" else 1) * (1.4 if plan.compile == "block" else 1)

    speeds(monkeypatch, speed, {"sdpa": 2.0, "blocked": 1.0})
    config, facts = case()
    found = tune(config, facts, tmp_path)
    assert found.settings == {"attention_backend": "blocked", "nproc_per_node": 8, "threads": 1, "compile": "block"}
    assert "2.00x" in found.reasons["attention_backend"] and "1.50x" in found.reasons["nproc_per_node"]
    assert Trial(tried="compile=whole", error="a kernel is wrong") in found.trials


def test_explicit_settings_are_never_tried_otherwise(case, tmp_path, monkeypatch):
    requested = {"tune": "full", "threads": 2, "precision": "fp32", "allocator": "system", "attention_backend": "sdpa"}
    tried = speeds(monkeypatch, lambda plan: 100)
    config, facts = case(requested, {"compile": "off"})
    assert tune(config, facts, tmp_path).settings == {}
    assert {(plan.threads, plan.precision, plan.compile) for plan in tried} == {(2, "fp32", "off")}


def test_projections_are_fused_on_a_cpu_where_that_is_faster(case, tmp_path, monkeypatch):
    speeds(monkeypatch, lambda plan: 100 * (1.1 if plan.fuse_projections == "on" else 1))
    config, facts = case()
    assert tune(config, facts, tmp_path).settings["fuse_projections"] == "on"
    speeds(monkeypatch, lambda plan: 100)
    assert "fuse_projections" not in tune(config, facts, tmp_path / "another home").settings


def test_half_weights_are_tried_in_bf16_where_a_step_has_several_micro_batches(case, tmp_path, monkeypatch):
    tried = speeds(monkeypatch, lambda plan: 100 * (1.1 if plan.half_weights == "on" else 1))
    config, facts = case()
    assert tune(config, facts, tmp_path).settings["half_weights"] == "on"
    tried.clear()
    for changes in ({"precision": "fp32"}, {"micro_batch_size": 16}):
        other = with_settings(config, changes)
        assert "half_weights" not in tune(other, facts, tmp_path / next(iter(changes))).settings
    assert tried and all(plan.half_weights == "off" for plan in tried)


def test_a_combination_that_the_plan_refuses_is_a_trial_that_failed(case, tmp_path, monkeypatch):
    """Workers are tried before half weights, which are for one."""
    speeds(monkeypatch, lambda plan: 100 * plan.nproc_per_node)
    config, facts = case()
    found = tune(config, facts, tmp_path)
    assert found.settings["nproc_per_node"] == 8 and "half_weights" not in found.settings
    (refused,) = [trial for trial in found.trials if trial.tried == "half_weights=on"]
    assert "half_weights" in refused.error


def test_quick_takes_the_fastest_allocator_and_tries_nothing_else_in_steps(case, tmp_path, monkeypatch):
    fast = {"tcmalloc": 100, "jemalloc": 130, "system": 120}
    tried = speeds(monkeypatch, lambda plan: fast[plan.allocator] * (2 if plan.compile != "off" else 1))
    config, facts = case({"tune": "quick"})
    both = {"allocators": {"tcmalloc": "/lib/libtcmalloc.so", "jemalloc": "/lib/libjemalloc.so"}}
    assert tune(config, facts, tmp_path).settings == {"attention_backend": "sdpa"} and not tried
    found = tune(config, changed(facts, both), tmp_path)
    assert found.settings == {"attention_backend": "sdpa", "allocator": "jemalloc"}
    assert [plan.allocator for plan in tried] == ["tcmalloc", "system", "jemalloc"]
    assert {trial.tried for trial in found.trials} >= {"allocator=system", "allocator=jemalloc"}


def test_cuda_graphs_are_tried_on_compiled_layers(case, tmp_path, monkeypatch):
    tried = speeds(monkeypatch, lambda plan: 100 * (1.2 if plan.compile_mode == "reduce-overhead" else 1))
    config, facts = case()
    able = {"gpus": [H100], "nccl": True, "versions": facts.versions | {"triton": "3.7"}}
    monkeypatch.setattr("infini_llama.tasks.patch_environment.tuning.tune._seconds_of", lambda *arguments: 1e6)
    found = tune(config, changed(facts, able), tmp_path)
    assert found.settings == {"compile_mode": "reduce-overhead", "attention_backend": "sdpa"}
    assert tried[-1].compile == "block" and tried[0].compile_mode == "default"
    sharded = config.model_copy(update={"train": config.train.model_copy(update={"parallel": "fsdp"})})
    assert "compile_mode" not in tune(sharded, changed(facts, able), tmp_path).settings


def test_compiling_has_a_time_limit(case, tmp_path, monkeypatch):
    speeds(monkeypatch, lambda plan: 140 if plan.compile != "off" else 100)
    steps = {"max_steps": 40_000, "micro_batch_size": 16}  # 40,000 steps, each of which saves 3 s of 10 s
    config, facts = case(train=steps)
    monkeypatch.setattr("infini_llama.tasks.patch_environment.tuning.tune._seconds_of", lambda *arguments: 1e5)
    assert tune(config, facts, tmp_path).settings["compile"] == "block"
    few = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 8})})
    assert "compile" not in tune(few, facts, tmp_path).settings


def test_a_short_run_skips_tuning_and_reports_it(case, tmp_path, monkeypatch):
    tried = speeds(monkeypatch, lambda plan: 100)
    config, facts = case(train={"max_steps": 200})
    found = tune(config, facts, tmp_path)
    assert not tried and found.settings == {} and "5 % of the run's time" in found.trials[0].error
    assert not (tmp_path / "tune-cache").exists(), "a longer run of these shapes may try"


def test_tuning_results_are_cached_per_machine_versions_and_shapes(case, tmp_path, monkeypatch):
    tried = speeds(monkeypatch, lambda plan: 200 if plan.nproc_per_node == 8 else 100)
    config, facts = case()
    first = tune(config, facts, tmp_path)
    count = len(tried)
    again = tune(config, facts, tmp_path)
    assert again == changed(first, {"cached": True}) and len(tried) == count > 0
    tune(config, changed(facts, {"versions": facts.versions | {"torch": "9"}}), tmp_path)
    assert len(tried) == 2 * count


def test_the_tuned_plan_is_pinned_at_the_first_attempt(case, tmp_path, monkeypatch):
    tried = speeds(monkeypatch, lambda plan: 200 if plan.nproc_per_node == 8 else 100)
    config, _ = case()
    machine = lay_out(tmp_path / "again")
    plan = begun(config, tmp_path, "run", machine=machine)
    assert (plan.nproc_per_node, plan.threads) == (8, 1) and "2.00x" in plan.reasons["threads"]
    count = len(tried)
    monkeypatch.setattr(
        "infini_llama.tasks.patch_environment.stage.tune", lambda *arguments: pytest.fail("tuned again")
    )
    later = begun(config, tmp_path, "run", machine=machine)
    assert (later.nproc_per_node, later.threads) == (8, 1) and len(tried) == count


def test_a_function_is_usable_if_it_agrees_with_exact_attention(monkeypatch):
    assert attention_trial.disagreement("blocked", "cpu", "fp32") == ""
    monkeypatch.setitem(flash.PLACES, "flash2", ("no_such_package", "function"))
    flash.function_of.cache_clear()
    assert "no_such_package" in attention_trial.disagreement("flash2", "cpu", "bf16")
    exact = backends.causal_attention
    monkeypatch.setattr(
        backends, "causal_attention", lambda q, k, v, *others: exact(q, k, v, *others) * (1 + (others[1] == "blocked"))
    )
    assert "differs" in attention_trial.disagreement("blocked", "cpu", "fp32")
    flash.function_of.cache_clear()
