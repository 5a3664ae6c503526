"""What torchrun starts for test_tensor_parallel.py: four ranks that share models of many kinds against one process (fp64)."""

import hashlib
import json
import os
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.callbacks.observe import gate_means, parameter_norm
from infini_llama.tasks.train.worker.checkpoint import load, prime, state_hash, tensors
from infini_llama.tasks.train.worker.loop import step_seed
from infini_llama.tasks.train.worker.optimizer import build_optimizer, set_learning_rate
from infini_llama.tasks.train.worker.position import Position
from infini_llama.tasks.train.worker.saver import Saver
from infini_llama.tasks.train.worker.step import accumulate, train_step
from infini_llama.tasks.train.worker.strategies.native import (
    LossModule,
    clip,
    distribute,
    gathered,
    local_part,
    replica_of,
    whole,
)
from infini_llama.tasks.train.worker.strategies.ranks import Ranks

LAYOUTS = {
    "alone": (4, {"parallel": "ddp"}),
    "ddp": (2, {"parallel": "ddp"}),
    "zero3": (2, {"parallel": "fsdp", "reshard_after_forward": True}),
    "zero2": (2, {"parallel": "fsdp", "reshard_after_forward": False}),
    "hsdp": (2, {"parallel": "hsdp", "shard_size": 1}),
}
PACKED = [(0, 3), (1, 6), (2, 4)]
KINDS: dict[str, dict] = {
    "softmax": {"attention": "softmax"},
    "normed": {"attention": "softmax", "qk_norm": True, "documents": True, "tie_word_embeddings": False},
    "odd words": {"attention": "softmax", "vocab_size": 61},
    "linear": {},
    "delta": {"memory_update": "delta", "qk_norm": True, "tie_word_embeddings": False},
    "bounded": {"memory_update": "delta_bounded", "documents": True},
    "literal": {"first_segment": "literal", "pre_norm": False},
    "recomputed": {"memory_update": "delta", "checkpointing": "full", "loss_chunk": 5},
    "selective": {"checkpointing": "selective", "vocab_size": 61, "loss_chunk": 5},
}
CLIP = 0.05


def small_model(options: dict) -> Llama:
    torch.manual_seed(0)
    fields = {"attention": "infini", "vocab_size": 64, "num_key_value_heads": 4} | options
    config = LlamaConfig(
        hidden_size=32, intermediate_size=36, num_hidden_layers=2, num_attention_heads=8, max_position_embeddings=16,
        segment_length=4, **fields,
    )  # fmt: skip
    model = Llama(config).double()
    for layer in model.model.layers:
        if config.attention == "infini":
            nn.init.normal_(layer.self_attn.gate)
        if config.qk_norm:
            nn.init.normal_(layer.self_attn.q_norm.weight)
            nn.init.normal_(layer.self_attn.k_norm.weight)
    return model


def ragged_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """12 rows of 13 tokens, of which each counts another number of targets, and some none at all."""
    rows = torch.randint(0, 61, (12, 14), generator=torch.Generator().manual_seed(3))
    labels = rows[:, 1:].clone()
    for row in range(12):
        labels[row, : min(13, (row * 5) % 16)] = -100
    return rows[:, :-1], labels


@torch.no_grad()
def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


class Training:
    """A model under one of LAYOUTS, or whole on every rank (None), with its optimizer; in fp32, with every kind of dropout."""

    def __init__(self, layout: str | None, ranks: Ranks) -> None:
        size, train = LAYOUTS[layout] if layout else (1, {})
        self.train = TrainingConfig(global_batch_size=12, warmup_steps=1).model_dump(mode="json") | train
        self.ranks = ranks
        ranks.share_model(size)
        self.model = small_model({"hidden_dropout": 0.1, "attention_dropout": 0.1, "qk_norm": True}).float()
        self.module = (
            LossModule(self.model) if layout is None else distribute(LossModule(self.model), self.train, ranks)
        )
        self.optimizer = build_optimizer(self.model, self.train)

    def steps(self, count: int) -> None:
        inputs, labels = ragged_batch()
        share = len(inputs) // self.ranks.groups
        rows = slice(self.ranks.group * share, (self.ranks.group + 1) * share)
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        for step in range(count):
            torch.manual_seed(step_seed(0, step, self.ranks.holder))
            set_learning_rate(self.optimizer, self.train, 1)
            batches = [(inputs[rows], labels[rows])]
            train_step(self.module, self.optimizer, batches, 100, CLIP, self.ranks, autocast, lambda: False)

    def hashes(self) -> tuple[str, str]:
        state = tensors(self.model, self.optimizer)
        return state_hash(state, "model."), state_hash(state, "optimizer.")

    def drifted(self) -> int:
        """Parts of parameters that two ranks no longer hold alike, to the bit."""
        mine = {}
        for name, value in self.model.named_parameters():
            assert isinstance(value, DTensor)
            _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            mine[name, offsets] = hashlib.sha256(local_part(value).numpy(force=True).tobytes()).hexdigest()
        held: list[dict] = [{} for _ in range(self.ranks.world_size)]
        dist.all_gather_object(held, mine)
        ways = defaultdict(set)
        for part, digest in (item for of_rank in held for item in of_rank.items()):
            ways[part].add(digest)
        assert len(mine) < len(ways) < sum(map(len, held)), "some parts are on several ranks, and some are not"
        return sum(len(digests) > 1 for digests in ways.values())


def survives(folder: Path, ranks: Ranks) -> bool:
    """Whether weights and moments, trained in one layout, are the same in every other that loads them, one after another."""
    before = None
    for step, layout in enumerate(("zero3", None, "alone", "ddp", "zero3")):
        training = Training(layout, ranks)
        if before is None:
            training.steps(3)
            assert not training.drifted()
            before = training.hashes()
        else:
            prime(training.optimizer)
            load(folder / f"step-{step - 1:08}", tensors(training.model, training.optimizer))
            if training.hashes() != before:
                return False
        with Saver(folder, training.train, ranks, None) as saver:
            saver.save(step, tensors(training.model, training.optimizer), Position(step).scalars())
    return True


def differences(kind: str, layout: str, ranks: Ranks) -> dict[str, float]:
    options = dict(KINDS[kind])
    packed, checkpointing = options.pop("documents", False), options.pop("checkpointing", "none")
    chunk = options.pop("loss_chunk", 0)
    inputs, labels = ragged_batch()
    documents = torch.tensor([[name for name, count in PACKED for _ in range(count)]] * len(inputs)) if packed else None
    count = int((labels != -100).sum())
    alone = small_model(options)
    alone.z_loss = 1e-2
    summed, _ = alone.loss(inputs, labels, documents)
    (summed / count).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in alone.named_parameters()}
    length, gates = parameter_norm(alone), gate_means(alone, ranks)
    norm = nn.utils.clip_grad_norm_(alone.parameters(), CLIP)

    model = small_model(options)
    untouched = state_hash(tensors(model, None), "model.")
    model.checkpoint_activations(checkpointing)
    model.loss_chunk, model.z_loss = chunk, 1e-2
    size, train = LAYOUTS[layout]
    ranks.share_model(size)
    module = distribute(LossModule(model), {"shard_size": 2, "reshard_after_forward": True} | train, ranks)
    assert state_hash(tensors(model, None), "model.") == untouched
    rows = len(inputs) // ranks.groups
    mine = slice(ranks.group * rows, (ranks.group + 1) * rows)
    parts = [x[mine].split(2) for x in (inputs, labels, documents) if x is not None]
    found = {}
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        total = accumulate(module, list(zip(*parts, strict=True)), count, ranks, torch.autocast("cpu", enabled=False))
        loss = ranks.sum(total.double().item())[0]
        found["loss"] = abs(loss - summed.item()) / summed.item()
        found["gradients"] = max(
            largest(whole(value.grad), gradients[name]) for name, value in model.named_parameters()
        )
    clipped = clip(module, CLIP)
    of_first = clipped.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(clipped, of_first), "the norm decides what all ranks do"
    found["norm"] = float((clipped - norm).abs() / norm)
    found["clipped"] = max(
        largest(whole(value.grad), other.grad)
        for value, other in zip(model.parameters(), alone.parameters(), strict=True)
    )
    found["parameter norm"] = abs(parameter_norm(model) - length) / length
    found["gates"] = max((abs(a - b) for a, b in zip(gate_means(model, ranks), gates, strict=True)), default=0.0)
    kept = ranks.sum(sum(local_part(value).numel() / replica_of(value, ranks)[1] for value in model.parameters()))[0]
    assert kept == sum(value.numel() for value in alone.parameters()), "each element once over all ranks"
    copy = gathered(model, ranks)
    assert (copy is not None) == ranks.is_first
    if copy is not None:
        assert state_hash(tensors(copy, None), "model.") == untouched
        assert (copy.lm_head.weight is copy.model.embed_tokens.weight) == copy.config.tie_word_embeddings
        found["logits"] = largest(copy(inputs, documents), alone(inputs, documents))
    with torch.no_grad():
        exact = sum(module(*batch).item() for batch in zip(*parts, strict=True))
    found["exact loss"] = abs(ranks.sum(exact if ranks.counts_loss else 0.0)[0] - summed.item()) / summed.item()
    return found


def main() -> None:
    torch.set_num_threads(1)
    ranks = Ranks("cpu", "gloo")
    cells = product(KINDS, LAYOUTS) if sys.argv[2] == "all" else zip(KINDS, LAYOUTS, strict=False)
    found: dict = {f"{kind}-{layout}": differences(kind, layout, ranks) for kind, layout in cells}
    training = Training("ddp", ranks)
    training.steps(4)
    found["drifted"], found["survives"] = training.drifted(), survives(Path(sys.argv[1]).parent / "checkpoints", ranks)
    if ranks.is_first:
        Path(sys.argv[1]).write_text(json.dumps(found))
    ranks.barrier()
    ranks.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
