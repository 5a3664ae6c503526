"""What a run reports: every step in metrics.jsonl, the same curves to each reporter, no step twice over a resume."""

import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import changed
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.metrics import TrainLine, ValidationLine
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.runs.heartbeat import Heartbeat
from infini_llama.tasks.runs.run_folder import RunFolder, cut_metrics, read_metrics
from infini_llama.tasks.train.worker.callbacks.callback import (
    StepResult,
    Training,
    Update,
)
from infini_llama.tasks.train.worker.callbacks.evaluation import rows_with
from infini_llama.tasks.train.worker.callbacks.metrics_hook import (
    call_hook,
    load_hook,
)
from infini_llama.tasks.train.worker.callbacks.metrics_writer import (
    MetricsWriter,
    Sample,
    TensorBoard,
    flat,
)
from infini_llama.tasks.train.worker.callbacks.peak_flops import (
    peak_flops,
    utilization,
)
from infini_llama.tasks.train.worker.callbacks.profiler import Profiler
from infini_llama.tasks.train.worker.callbacks.reporting import Reporter, ReporterThread
from support.records import make_attempt, make_config

CONFIG = {"train": {"seed": 1, "sample_prompts": ["a"]}}


def step(number: int, loss: float = 2.0) -> TrainLine:
    timing = {
        "step_time": number / 10,
        "data_time": 0.1,
        "save_time": 0.0,
        "tokens_per_second": 5.0,
        "mfu": 0.5,
    }
    logged = {
        "param_norm": 3.0,
        "gates": [[0.2, 0.3], [0.5]],
        "custom": {"largest": 7.0},
    }
    if number % 2:
        logged = {"param_norm": None, "gates": (), "custom": {}}
    record = {
        "kind": "train",
        "step": number,
        "loss": loss,
        "learning_rate": 1e-3,
        "grad_norm": math.inf,
        "memory_peak": 100,
    }
    return TrainLine.model_validate(
        record | logged | timing | {"goodput": {"training": float(number)}}
    )


def threaded(create: Callable[[], Reporter]) -> ReporterThread:
    return ReporterThread("TensorBoard", create, longest_wait=60)


def attempt(run_dir, first: int, last: int) -> None:
    cut_metrics(RunFolder(run_dir), first, is_evaluation_due=False)
    metrics = MetricsWriter(
        run_dir, 2, [threaded(lambda: TensorBoard(run_dir, first, CONFIG))]
    )
    for number in range(first + 1, last + 1):
        metrics.train(step(number))
        if number % 2 == 0:
            validation = ValidationLine(
                kind="validation", step=number, loss=2.0, bits_per_byte=math.nan
            )
            metrics.validation(
                validation.model_copy(
                    update={"memory_reads": (0.5,), "memory_norms": (9.0,)}
                )
            )
            metrics.samples(number, [Sample("p", f"p at {number}")])
    metrics.close()
    metrics.close_reporters(finished=last == 8)


def test_a_resumed_run_reports_every_step_once(tmp_path):
    attempt(tmp_path, 0, 6)
    attempt(tmp_path, 4, 8)
    lines = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(
        range(1, 9)
    )
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [
        2,
        4,
        6,
        8,
    ]
    assert lines[0]["grad_norm"] is None, "JSON has no word for infinity"
    assert not lines[0].keys() & {"param_norm", "gates", "custom"}, "not measured"
    logged = next(line for line in lines if line["step"] == 4)
    assert logged["step_time_spread"] == pytest.approx(
        {"p50": 0.25, "p90": 0.37, "p99": 0.397}
    )
    samples = [
        json.loads(line)
        for line in (tmp_path / "samples.jsonl").read_text().splitlines()
    ]
    assert [sample["text"] for sample in samples] == [
        f"p at {number}" for number in (2, 4, 6, 8)
    ]


def test_gates_that_are_not_finite_are_null_and_the_line_is_read_again(tmp_path):
    metrics = MetricsWriter(tmp_path, 1, [])
    metrics.train(
        step(2).model_copy(
            update={"gates": ((0.25, math.nan),), "custom": {"largest": math.inf}}
        )
    )
    metrics.close()
    (line,) = read_metrics(RunFolder(tmp_path))
    assert (
        line.gates == ((0.25, None),)
        and line.mean_gate == 0.25
        and line.custom == {"largest": None}
    )


def test_tensorboard_has_the_groups_and_nothing_twice(tmp_path):
    attempt(tmp_path, 0, 6)
    attempt(tmp_path, 4, 8)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = set(events.Tags()["scalars"])
    expected = {
        "train/loss",
        "train/param_norm",
        "validation/loss",
        "system/mfu",
        "system/step_time_p90",
        "system/memory_peak",
        "gates/layer-1",
        "custom/largest",
        "goodput/training",
        "final/validation/loss",
        "gate-heads/layer-0-head-1",
        "memory-reads/layer-0",
        "memory-norms/layer-0",
    }
    assert (
        expected <= scalars
        and not {"train/grad_norm", "validation/bits_per_byte"} & scalars
    ), "not finite"
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6, 8], (
        "purge_step takes the lost 6 away"
    )
    texts = set(events.Tags()["tensors"])
    assert {"configuration/text_summary", "samples/text_summary"} <= texts
    assert "_hparams_/experiment" in events.summary_metadata


def test_a_large_model_has_no_curve_per_head(tmp_path):
    metrics = MetricsWriter(
        tmp_path, 1, [threaded(lambda: TensorBoard(tmp_path, 0, CONFIG))]
    )
    metrics.train(step(2).model_copy(update={"gates": ((0.5,) * 33,) * 2}))
    metrics.close_reporters(finished=False)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert not [
        name for name in events.Tags()["scalars"] if name.startswith("gate-heads")
    ]


def test_settings_are_flat_for_hparams():
    assert flat({"a": {"b": 1, "c": [1]}, "d": None}) == {
        "a.b": 1,
        "a.c": "[1]",
        "d": "null",
    }


def test_a_hook_is_called_and_its_errors_are_reported(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def largest(model, record):\n    return {'largest': max(p.abs().max().item() for p in model.parameters())}\n"
        "def wrong(model, record):\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = Llama(LlamaConfig(61, 16, 32, 1, 2, 2, 16))
    found = call_hook(
        load_hook("mine:largest"), "mine:largest", model, TrainLine(step=1)
    )
    assert found == {"largest": 1.0}
    with pytest.raises(ConfigError, match="mine:wrong"):
        call_hook(load_hook("mine:wrong"), "mine:wrong", model, TrainLine(step=1))
    for name in ("nowhere:at_all", "mine:missing"):
        with pytest.raises(ConfigError, match=f"train.metrics_hook={name}"):
            load_hook(name)
    assert load_hook(None) is None


@pytest.mark.parametrize(
    "does",
    [
        "model.eval()",
        "model.hidden(torch.tensor([[1, 2]])).sum().backward()",
        "model.requires_grad_(False)",
        "torch.set_grad_enabled(False)",
        "raise SystemExit(3)",
    ],
)
def test_a_hook_only_measures(tmp_path, monkeypatch, does):
    (tmp_path / "changing.py").write_text(
        f"import torch\ndef measure(model, record):\n    {does}\n    return {{}}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "changing", raising=False)
    model = Llama(LlamaConfig(61, 16, 32, 1, 2, 2, 16))
    model.model.norm.requires_grad_(False)
    hook = load_hook("changing:measure")
    with suppress(RuntimeError):
        call_hook(hook, "changing:measure", model, TrainLine(step=1))
    assert torch.is_grad_enabled() and model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    assert frozen == ["model.norm.weight"]


def test_the_profiler_records_its_span_only_and_ends_with_the_run(tmp_path):
    heartbeat = Heartbeat(tmp_path, 0)
    phases = []
    heartbeat.ledger = SimpleNamespace(leave=phases.append)

    def profiling(folder, span):
        config = changed(make_config(), train={"profile_steps": span})
        training = Training(
            make_attempt(tmp_path, config),
            None,
            None,
            SimpleNamespace(rank=0),
            heartbeat,
            lambda: False,
        )
        return Profiler(training, folder)

    profiler = profiling(tmp_path / "profile", [2, 9])
    result = StepResult(Update(2.0, 1.0, False, False), 0, TrainLine(step=1, targets=8))
    for number in (1, 2, 3):
        profiler.on_step_start(TrainState(step=number - 1))
        assert (profiler.running is not None) == (number >= 2)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.on_step_end(TrainState(step=number), result)
    profiler.on_train_end()
    assert "aten::mm" in (tmp_path / "profile/rank-0.txt").read_text()
    assert (tmp_path / "profile/rank-0.trace.json.gz").stat().st_size > 0
    # Neither its end nor its writing is limited by what a step takes.
    assert phases.count("samples") == 2
    profiling(tmp_path / "none", None).on_step_start(TrainState())
    assert not (tmp_path / "none").exists()


def test_the_peak_flops_measurement_does_not_touch_the_generators():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert 1e8 < peak_flops(torch.device("cpu"), torch.float32) < 1e15
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 1), (10, 1), (11, 2), (35, 4), (999, 5)]
)
def test_held_out_tokens_are_the_first_rows_that_have_them(tokens, rows):
    class Reader:
        sources = ()

        def __len__(self) -> int:
            return 5

        def count_targets(self, chosen: np.ndarray) -> int:
            assert len(chosen) == 1, "not the masks of all rows at once"
            return 10

    assert rows_with(Reader(), tokens) == rows


def test_a_share_above_the_measured_peak_is_no_share():
    assert utilization(5.0, 10.0) == 0.5 and utilization(18.8, 10.0) is None
