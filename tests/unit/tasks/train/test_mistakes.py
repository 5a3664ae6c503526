"""A user's mistakes end before the first step, each with its sentence."""

import json
import sys

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.schema import PipelineConfig, TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.patch_environment.planning.plan import resolve
from infini_llama.tasks.records.machine import Cpu, MachineFacts
from infini_llama.tasks.records.plan import PinnedSettings
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.checkpoints import FORMAT_VERSION, KIND, STATE_FILE, checkpoint_path
from infini_llama.tasks.runs.run_folder import RunFolder, append_attempt
from infini_llama.tasks.storage.artifacts import commit, staging
from infini_llama.tasks.train.length import resolve_max_steps
from infini_llama.tasks.train.prepare import choose_checkpoint, refuse_other_model
from infini_llama.tasks.train.run_context import RunContext
from infini_llama.tasks.train.worker.callbacks.reporters import reporters
from support.made_up_runs import LINEAGE
from support.records import make_context, make_dataset, make_plan

INFINI = {"attention": "infini", "segment_length": 32}
CPU = MachineFacts(python="3.11", cpu=Cpu(model="x"), cores=2, versions={}, gpus=())


def settings(**sections: dict) -> dict:
    return parse_config({"data": {"source": "python-stdlib"}} | sections).model_dump(mode="json")


def model(**changes: int) -> LlamaConfig:
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaConfig.from_dict(sizes | heads | changes)


def resuming(run: RunFolder, resume: str, invocation: str, model: LlamaConfig) -> RunContext:
    config = parse_config({"data": {"source": "python-stdlib"}, "runtime": {"resume": resume}})
    return make_context(run, config, invocation=invocation, model=model)


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        (
            {"model": {"hidden_size": 4, "num_attention_heads": 8}},
            ["model.num_attention_heads=8", "model.hidden_size=4"],
        ),
        ({"model": {"num_attention_heads": 4, "num_key_value_heads": 3}}, ["model.num_key_value_heads=3"]),
        (
            {"train": {"max_steps": 10, "warmup_steps": 10}},
            ["train.warmup_steps=10", "train.max_steps=10"],
        ),
        (
            {"train": {"context_parallel": 2}},
            ["train.context_parallel=2", "model.attention=softmax"],
        ),
        (
            {
                "train": {"context_parallel": 4},
                "model": {"attention": "infini", "segment_length": 64},
                "data": {"source": "python-stdlib", "sequence_length": 384},
            },
            ["train.context_parallel=4", "data.sequence_length=384", "model.segment_length=64"],
        ),
        (
            {"train": {"context_parallel": 2}, "model": INFINI, "environment": {"nproc_per_node": 3}},
            ["train.context_parallel=2", "environment.nproc_per_node=3"],
        ),
        (
            {"train": {"context_parallel": 2}, "model": INFINI | {"memory_gradient_segments": 3}},
            ["model.memory_gradient_segments=3", "data.sequence_length=256"],
        ),
        (
            {
                "train": {"context_parallel": 2},
                "model": INFINI,
                "data": {"source": "python-stdlib", "curriculum": [{"sequence_length": 32, "until_step": 5}]},
            },
            ["train.context_parallel=2", "data.curriculum", "model.segment_length=32"],
        ),
        ({"train": {"profile_steps": [5, 2]}}, ["train.profile_steps"]),
        ({"train": {"report_to": ["mlflow"]}}, ["train.report_to"]),
        ({"train": {"metrics_hook": "no function"}}, ["train.metrics_hook"]),
    ],
)
def test_settings_that_contradict_each_other_are_named(sections, keys):
    with pytest.raises(ConfigError) as raised:
        settings(**sections)
    assert all(key in str(raised.value) for key in keys)


def test_workers_that_share_sequences_come_in_whole_groups(caplog):
    given = settings(train={"context_parallel": 2}, model=INFINI, environment={"device": "cpu"})
    config = PipelineConfig.model_validate(given)
    plan = resolve(config, CPU)
    assert plan.nproc_per_node == 2
    for count, kept in ((3, 2), (4, 4)):  # 32 sequences are two micro-batches of eight for two groups of two
        pinned = PinnedSettings.from_json(plan.to_json() | {"nproc_per_node": count})
        assert resolve(config, CPU, pinned).nproc_per_node == kept
    assert caplog.text.count("train.context_parallel=2, but 3 worker(s)") == 1


def test_more_steps_than_data_where_rows_may_not_repeat(tmp_path):
    dataset = make_dataset()
    train = TrainingConfig(max_steps=13, global_batch_size=8, warmup_steps=1)
    assert resolve_max_steps(train, dataset, tmp_path) == 13
    once = train.model_copy(update={"repeat_data": False})
    with pytest.raises(ConfigError, match=r"104 .* 100 .* 12 "):
        resolve_max_steps(once, dataset, tmp_path)
    assert resolve_max_steps(once.model_copy(update={"max_steps": 12}), dataset, tmp_path) == 12
    with pytest.raises(ConfigError, match="100"):
        resolve_max_steps(once.model_copy(update={"max_steps": None, "num_epochs": 2.0}), dataset, tmp_path)


def test_a_checkpoint_of_another_model(tmp_path):
    state = {"model": {"hidden_size": 64, "vocab_size": 512}, "world_size": 1, "step": 7}
    (tmp_path / STATE_FILE).write_text(json.dumps(state))
    assert refuse_other_model(tmp_path, model(hidden_size=64, vocab_size=512), make_plan()) == 7
    with pytest.raises(ConfigError, match=r"model\.hidden_size: 64 .* 128 "):
        refuse_other_model(tmp_path, model(hidden_size=128, vocab_size=512), make_plan())


def test_a_refused_checkpoint_of_another_run_is_refused_again(tmp_path):
    theirs, run = checkpoint_path(tmp_path / "theirs", 7), RunFolder(tmp_path / "mine")
    run.checkpoints.mkdir(parents=True)
    run.lineage.write_text(json.dumps(LINEAGE))
    staged = staging(theirs)
    (staged / STATE_FILE).write_text(json.dumps({"model": {"hidden_size": 64}, "world_size": 1, "step": 7}))
    commit(staged, theirs, KIND, FORMAT_VERSION, meta={}, content={"step": 7})
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"model\.hidden_size"):
            choose_checkpoint(resuming(run, str(theirs), "a", model(hidden_size=128)))
        assert "resumed_from" not in run.read(run.lineage)
    for _ in range(2):
        assert choose_checkpoint(resuming(run, str(theirs), "a", model(hidden_size=64))) == (theirs, 7)
        assert run.read(run.lineage)["resumed_from"] == str(theirs)


def test_runtime_resume_applies_to_the_first_attempt_of_each_command(tmp_path):
    run = RunFolder(tmp_path / "mine")
    own = checkpoint_path(run.checkpoints, 7)
    own.parent.mkdir(parents=True)
    run.lineage.write_text(json.dumps(LINEAGE))
    staged = staging(own)
    (staged / STATE_FILE).write_text(json.dumps({"model": {}, "world_size": 1, "step": 7}))
    commit(staged, own, KIND, FORMAT_VERSION, meta={}, content={"step": 7})
    append_attempt(run, AttemptRecord(attempt=1, invocation="a", kind="failed", code=70))
    assert choose_checkpoint(resuming(run, "never", "a", model())) == (own, 7), "it was saved since"
    with pytest.raises(ConfigError, match=r"runtime\.resume=never"):
        choose_checkpoint(resuming(run, "never", "b", model()))


def test_a_reporter_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"infini-llama\[wandb\]"):
        reporters(["wandb"], tmp_path, 0, {})
