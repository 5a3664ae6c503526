"""The estimated memory of a step against the bytes of real tensors, part by part."""

import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infini_llama import configs
from infini_llama.configs.loading import load_config, parse_config
from infini_llama.configs.schema import PipelineConfig
from infini_llama.flows.cli.tables import estimate_text
from infini_llama.model.config import LlamaConfig, flops_per_token, parameters
from infini_llama.model.llama import Llama
from infini_llama.model.loss import in_chunks
from infini_llama.tasks.estimate import run
from infini_llama.tasks.patch_environment.footprint import bytes_needed, model_of
from infini_llama.tasks.records.estimate import RunSize
from infini_llama.tasks.train.worker.initial_model import save_memory
from infini_llama.tasks.train.worker.strategies.optimizer import build_optimizer

ANSWERS = {
    "name": "sums",
    "source": "python-stdlib",
    "loss_on": "answer",
    "answer_after": "=",
}


def settings(
    model: dict | None = None,
    train: dict | None = None,
    backend: str = "auto",
    data: dict | None = None,
) -> PipelineConfig:
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    text = {
        "source": "python-stdlib",
        "sequence_length": 128,
        "tokenizer": {"vocab_size": 1000},
    } | (data or {})
    batch = {"micro_batch_size": 3, "global_batch_size": 6}
    given = {
        "data": text,
        "model": sizes | {"segment_length": 64} | (model or {}),
        "train": batch | (train or {}),
    }
    return parse_config(given | {"environment": {"attention_backend": backend}})


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are alive; `highest` is their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: set[int] = set()
        self.bytes = self.highest = 0

    def freed(self, storage: int, size: int) -> None:
        self.alive.remove(storage)
        self.bytes -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive.add(storage._cdata)
                    self.bytes += storage.nbytes()
                    weakref.finalize(
                        storage, self.freed, storage._cdata, storage.nbytes()
                    )
        self.highest = max(self.highest, self.bytes)
        return result


def real_peak(
    config: PipelineConfig,
    precision: str,
    loss_chunk: int,
    keeps_attention_weights: bool,
) -> int:
    """The most bytes of real tensors in training: after one update, so with its state, in the second of two micro-batches."""
    train = config.train
    fields = config.model.architecture(config.data.tokenizer.vocab_size, 128)
    half = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")
    with LiveBytes() as live:
        model = Llama(
            LlamaConfig(**fields),
            config.environment.attention_backend.replace("auto", "sdpa"),
        )
        model.freeze(train.frozen_layers)
        save_memory(model, train, loss_chunk, keeps_attention_weights)
        optimizer = build_optimizer(model, train)
        for micro_batches in (1, 2):
            for _ in range(micro_batches):
                ids, labels = (
                    torch.zeros((3, 128), dtype=torch.long),
                    torch.zeros((3, 128), dtype=torch.long),
                )
                with half:
                    loss, _ = model.loss(ids, labels)
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return live.highest


@pytest.mark.parametrize(
    ("model", "train", "precision", "backend"),
    [
        ({}, {}, "fp32", "auto"),
        ({}, {}, "fp32", "blocked"),
        ({}, {}, "fp32", "blocked, recomputed"),
        ({}, {"loss_chunk": 64}, "bf16", "auto"),
        ({"attention": "infini"}, {}, "bf16", "auto"),
        ({"attention": "infini"}, {}, "bf16", "blocked"),
        ({"attention": "infini"}, {"activation_checkpointing": "full"}, "fp32", "auto"),
        (
            {"attention": "infini", "memory_layers": [1]},
            {"init_from": "folder", "frozen_layers": 1},
            "fp32",
            "auto",
        ),
        (
            {"attention": "infini", "memory_layers": [1]},
            {"init_from": "folder", "frozen_layers": "all_but_memory"},
            "fp32",
            "auto",
        ),
    ],
)
def test_the_count_is_that_of_real_tensors(model, train, precision, backend):
    backend, _, recomputed = backend.partition(", ")
    config, keeps = (
        settings({"num_hidden_layers": 2} | model, train, backend),
        backend == "blocked" and not recomputed,
    )
    counted = sum(
        bytes_needed(
            config, 3, precision, "cpu", 1, keeps_attention_weights=keeps
        ).values()
    )
    chunk = train.get("loss_chunk", 0)
    assert counted == pytest.approx(
        real_peak(config, precision, chunk, keeps), rel=0.15
    )


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_logits_in_parts_are_those_of_real_tensors(precision, dtype):
    """Nothing else is large here; the operator's own tensors are not seen from outside, so its function is called."""
    hidden, weight, labels = (
        torch.zeros(384, 2, dtype=dtype),
        torch.zeros(1000, 2),
        torch.zeros(384, dtype=torch.long),
    )
    with LiveBytes() as live:
        in_chunks(hidden, weight, labels, 64, 0.0, None, None, True, True)
    counted = bytes_needed(settings(train={"loss_chunk": 64}), 3, precision, "cpu", 1)[
        "logits"
    ]
    assert counted == pytest.approx(live.highest, rel=0.15)


def test_parts_match_their_names():
    config = settings()
    single = bytes_needed(config, 3, "fp32", "cpu", 1)
    whole = 4 * parameters(model_of(config))
    assert (
        single["weights"] == single["gradients"] == whole
        and single["optimizer"] == 2 * whole
    )
    assert (
        single["logits"] == 3 * 128 * 1000 * 12 and single["batches"] == 2 * 8 * 3 * 128
    )
    sharded = bytes_needed(settings(train={"parallel": "fsdp"}), 3, "fp32", "cpu", 4, 2)
    assert (
        sharded["optimizer"] == 2 * (whole // 8)
        and whole // 8 < sharded["weights"] < whole
    )
    chunked = settings(train={"loss_chunk": 16})
    assert bytes_needed(chunked, 3, "fp32", "cpu", 1)["logits"] == 16 * 1000 * 4
    full = settings(train={"activation_checkpointing": "full"})
    assert (
        bytes_needed(full, 3, "fp32", "cpu", 1)["activations"]
        < single["activations"] / 2
    )


def test_estimate_of_a_configuration(tmp_path):
    settings = load_config(
        "tiny_infini", [f"runtime.home={tmp_path}", "environment.nproc_per_node=2"]
    )
    _, record = run.estimate(settings)
    flops, memory = record.flops_per_token, record.memory
    config = model_of(settings.with_vocab_size(run.vocabulary_of(settings)))
    assert (
        flops.total
        == flops_per_token(config, 256)
        == flops.matrices + flops.attention + flops.memory
    )
    assert flops.memory > 0 and flops.attention > 0
    assert record.run == RunSize(
        tokens_per_step=4096, tokens=1_024_000, flops=flops.total * 1_024_000
    )
    assert memory["total"] == sum(
        value for part, value in memory.items() if part != "total"
    )
    assert (
        record.checkpoint == 12 * record.parameters.total
        and memory["checkpoint_copy"] == record.checkpoint // 2
    )
    assert not list(tmp_path.glob("runs/*"))
    epochs = load_config(
        "tiny_infini",
        [f"runtime.home={tmp_path}", "train.num_epochs=2", "train.max_steps=null"],
    )
    assert run.estimate(epochs)[1].run == RunSize(
        tokens_per_step=4096, tokens=None, flops=None
    )
    assert "4,096" in estimate_text(run.estimate(epochs)[1])


@pytest.mark.parametrize(
    ("data", "train", "tokens"),
    [
        ({}, {"max_tokens": 6 * 128}, 6 * 128),
        ({}, {"max_tokens": 6 * 128 + 1}, 2 * 6 * 128),
        ({"packing": "window", "stride": 64}, {"max_tokens": 1}, 6 * 128),
        ({"packing": "padded"}, {"max_tokens": 5000}, None),
        ({"packing": "padded"}, {"max_steps": 2}, 2 * 6 * 128),
        ({"loss_on": "answer", "answer_after": "="}, {"max_tokens": 5000}, None),
        ({"source": "files", "sources": [ANSWERS]}, {"max_tokens": 5000}, None),
        ({"loss_on": "answer", "answer_after": "="}, {"max_steps": 2}, 2 * 6 * 128),
    ],
)
def test_tokens_are_those_that_the_run_reads_or_left_out(data, train, tokens):
    _, record = run.estimate(settings(train={"warmup_steps": 0} | train, data=data))
    assert record.run.tokens == tokens


@pytest.mark.parametrize(("name", "workers"), [("xl", 1), ("7b", 8)])
def test_a_preset_for_gpus_of_80_gb_states_its_estimate_and_fits(
    name, workers, tmp_path
):
    _, record = run.estimate(load_config(name, [f"runtime.home={tmp_path}"]))
    layout, total = record.layout, record.memory["total"]
    assert (layout.workers, layout.shards) == (workers, workers)
    assert (layout.device, layout.precision) == ("cuda", "bf16")
    assert total < 0.8 * 80e9
    assert "process" not in record.memory, (
        "what torch's allocator gives out, not what a process has"
    )
    assert (
        f"{total / 1e9:.1f} GB"
        in Path(configs.__path__[0], f"{name}.yaml").read_text().split("data:")[0]
    )
