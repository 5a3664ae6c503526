"""The count without memory against the bytes of real tensors, part by part."""

import gc

import pytest
import torch

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import load_config
from infini_llama.configs.schema import TrainingConfig
from infini_llama.flows.pipeline import resolved
from infini_llama.model.config import LlamaConfig
from infini_llama.model.flops import flops_per_token
from infini_llama.model.llama import Llama
from infini_llama.tasks.estimate import run
from infini_llama.tasks.estimate.live import LiveBytes
from infini_llama.tasks.estimate.memory import Layout, step_memory
from infini_llama.tasks.train.worker.build import save_memory
from infini_llama.tasks.train.worker.optimizer import build_optimizer

TRAIN = TrainingConfig(micro_batch_size=3, global_batch_size=6).model_dump(mode="json")


def layout(**changes):
    fields = {"micro_batch_size": 3, "sequence_length": 70, "micro_batches": 2, "workers": 1, "shards": 1}
    return Layout(
        **(fields | {"reshard_after_forward": True, "precision": "fp32", "device": "cpu", "loss_chunk": 0} | changes)
    )


def model_of(**changes):
    return LlamaConfig(**({"vocab_size": 500, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3} | {
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 70, "segment_length": 16} | changes))  # fmt: skip


def real_peak(config, train, at):
    """The most bytes of real tensors during the second step of training."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    half = torch.autocast("cpu", dtype=torch.bfloat16, enabled=at.precision == "bf16")
    gc.collect()
    with LiveBytes(lambda tensor: "all") as live:
        with torch.device("meta"):
            model = Llama(config)
        model.load_state_dict({name: torch.zeros(value.shape) for name, value in model.named_parameters()}, False, True)
        model.tie_weights()
        save_memory(model, train, at.loss_chunk)
        optimizer = build_optimizer(model, train)
        for _ in range(2):
            live.begin()
            for _ in range(at.micro_batches):
                shape = (at.micro_batch_size, at.sequence_length)
                ids, labels = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
                with half:
                    loss, _ = model.loss(ids, labels)
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        found = live.highest
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize(
    ("attention", "train", "precision", "loss_chunk"),
    [
        ("softmax", {}, "fp32", 0),
        ("softmax", {"z_loss": 1e-4}, "bf16", 64),
        ("infini", {}, "bf16", 0),
        ("infini", {"activation_checkpointing": "full"}, "fp32", 0),
    ],
)
def test_the_count_is_that_of_real_tensors(attention, train, precision, loss_chunk):
    config, at = model_of(attention=attention), layout(precision=precision, loss_chunk=loss_chunk)
    counted = sum(step_memory(config, TRAIN | train, at).values())
    assert counted == pytest.approx(real_peak(config, TRAIN | train, at), rel=0.01)


def test_parts_are_what_they_are_called():
    config = model_of(tie_word_embeddings=False)
    with torch.device("meta"):
        parameters = sum(parameter.nbytes for parameter in Llama(config).parameters())
    alone, both = step_memory(config, TRAIN, layout()), step_memory(config, TRAIN, layout(workers=2))
    steps = 4 * len(list(Llama(config).parameters()))  # AdamW counts the steps of each
    assert alone["weights"] == both["weights"] == parameters
    assert 2 * parameters <= alone["optimizer"] <= 2 * parameters + steps
    assert both["gradients"] == parameters, "buckets of DDP stay"
    rows = 3 * 70
    assert alone["logits"] >= 2 * rows * 500 * 4
    half = step_memory(config, TRAIN, layout(workers=2, shards=2))
    assert half["optimizer"] < alone["optimizer"] * 0.51
    chunked = step_memory(config, TRAIN, layout(loss_chunk=16))
    assert chunked["logits"] < alone["logits"] / 4
    assert (
        step_memory(config, TRAIN | {"activation_checkpointing": "full"}, layout())["activations"]
        < alone["activations"]
    )


def test_estimate_of_a_configuration(monkeypatch, tmp_path):
    monkeypatch.setattr(
        run, "process_memory", lambda tensors, threads, environment: 100
    )  # measured in tests/integration
    settings = resolved(load_config("tiny_infini", [f"runtime.home={tmp_path}", "environment.nproc_per_node=2"]))
    record = run.estimate(settings)
    flops, memory = record["flops_per_token"], record["memory"]
    config = LlamaConfig.from_dict(run.fields_of(settings))
    assert (
        flops["total"]
        == flops_per_token(config, 256)
        == sum(flops[part] for part in ("matrices", "attention", "memory"))
    )
    assert flops["memory"] > 0 and flops["attention"] > 0
    assert record["run"] == {"tokens_a_step": 4096, "tokens": 1_024_000, "flops": flops["total"] * 1_024_000}
    assert memory["total"] == sum(value for part, value in memory.items() if part != "total")
    assert (
        record["checkpoint"] == 12 * record["parameters"]["total"]
        and memory["checkpoint_copy"] == record["checkpoint"] // 2
    )
    assert not list(tmp_path.glob("runs/*"))


def test_a_machine_that_this_is_not(monkeypatch, tmp_path):
    wishes = [
        "environment.device=cuda",
        "environment.nproc_per_node=8",
        "train.parallel=fsdp",
        "train.micro_batch_size=2",
    ]
    record = run.estimate(resolved(load_config("tiny_20m", [f"runtime.home={tmp_path}", *wishes])))
    assert (record["layout"]["workers"], record["layout"]["shards"]) == (8, 8)
    assert (record["layout"]["device"], record["layout"]["precision"]) == ("cuda", "bf16")
    assert "process" not in record["memory"], "what torch's allocator gives out, not what a process has"
    with pytest.raises(ConfigError, match="is not a multiple"):
        run.estimate(
            resolved(load_config("tiny_20m", [*wishes[:2], "train.global_batch_size=64", "train.micro_batch_size=16"]))
        )
