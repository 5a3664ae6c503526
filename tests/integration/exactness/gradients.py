"""What torchrun starts for test_gradients.py: gradients of four ranks under every strategy against those of the whole batch."""

import faulthandler
import json
import sys
from itertools import product
from pathlib import Path

import torch
from torch import nn

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.storage.tensors import full_tensor, model_tensors, state_hash
from infini_llama.tasks.train.worker.strategies.native import DDP, FSDP
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from support.leaving import leave_together

STRATEGIES = {
    "ddp": {"parallel": "ddp"},
    "zero3": {"parallel": "fsdp", "zero_stage": 3},
    "zero2": {"parallel": "fsdp", "zero_stage": 2},
    "hsdp": {"parallel": "hsdp", "shard_size": 2, "zero_stage": 3},
}
CONTEXT = 2  # ranks that share rows, in the cells that have any
CLIP = 0.05


def small_model(attention: str) -> Llama:
    torch.manual_seed(0)
    return Llama(
        LlamaConfig(61, 20, 36, 2, 2, 1, 16, attention=attention, segment_length=4)
    ).double()


def ragged_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """12 rows of 13 tokens, of which each counts another number of targets, and some none at all."""
    rows = torch.randint(0, 61, (12, 14), generator=torch.Generator().manual_seed(3))
    labels = rows[:, 1:].clone()
    for row in range(12):
        labels[row, : min(13, (row * 5) % 16)] = -100
    return rows[:, :-1], labels


def row_weights(labels: torch.Tensor) -> torch.Tensor:
    """Weights of the rows [12], which are by turns of two sources with other loss weights."""
    weights = torch.tensor([6.0, 0.5], dtype=torch.float64).repeat(6)
    targets = (labels != -100).sum(dim=1)
    return weights * (targets.sum() / (weights * targets).sum())


def differences(
    attention: str,
    strategy: str,
    micro: int,
    context: int,
    weighted: bool,
    ranks: Ranks,
) -> dict[str, float]:
    inputs, labels = ragged_batch()
    count = int((labels != -100).sum())
    single = small_model(attention)
    logits = single(inputs).flatten(0, 1)
    mean = nn.functional.cross_entropy(logits, labels.flatten())
    losses = nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    of_targets = torch.tensor([6.0, 0.5], dtype=torch.float64).repeat(6)[:, None]
    of_targets = (of_targets * (labels != -100)).flatten()
    objective = (losses * of_targets).sum() / of_targets.sum() if weighted else mean
    objective.backward()
    expected = {
        name: parameter.grad.clone() for name, parameter in single.named_parameters()
    }
    norm = nn.utils.clip_grad_norm_(single.parameters(), CLIP)

    model = small_model(attention)
    untouched = state_hash(model_tensors(model), "model.")
    ranks.use_context_parallel(context)
    train = TrainingConfig(max_grad_norm=CLIP, **STRATEGIES[strategy])
    kind, autocast = (
        DDP if train.parallel == "ddp" else FSDP,
        torch.autocast("cpu", enabled=False),
    )
    parallel = kind(model, train, ranks, autocast, micro)
    assert state_hash(model_tensors(model), "model.") == untouched
    share = len(inputs) // ranks.data_world_size
    mine = slice(ranks.data_rank * share, (ranks.data_rank + 1) * share)
    parts = [inputs[mine].split(micro), labels[mine].split(micro)]
    if weighted:
        weights = row_weights(labels)[mine].split(micro)
        parts += [[None] * len(weights), weights]
    batches = list(zip(*parts, strict=True))
    found = {}
    for _ in range(2):  # DDP lays out its buckets anew after the first
        parallel.discard_gradients()
        total = parallel.accumulate(batches, count)
        loss = ranks.sum(total.double().item())[0] / count
        found["loss"] = abs(loss - mean.item()) / mean.item()
        found["gradients"] = max(
            float(
                (full_tensor(parameter.grad) - expected[name]).abs().max()
                / expected[name].abs().max()
            )
            for name, parameter in model.named_parameters()
        )
    parallel.clip_gradients()
    found["norm"] = float((parallel.norm - norm).abs() / norm)
    found["clipped"] = max(
        float(
            (full_tensor(parameter.grad) - parameter_alone.grad).abs().max()
            / parameter_alone.grad.abs().max()
        )
        for parameter, parameter_alone in zip(
            model.parameters(), single.parameters(), strict=True
        )
    )
    copy = parallel.to_plain_model()
    assert (copy is not None) == ranks.is_rank0
    if copy is not None:
        assert state_hash(model_tensors(copy), "model.") == untouched
        assert copy.lm_head.weight is copy.model.embed_tokens.weight
    return found


def main() -> None:
    faulthandler.enable()  # the other ranks report a lost connection only
    torch.set_num_threads(1)
    ranks = Ranks("cpu", "gloo")
    cells = [
        *product(("softmax", "infini"), STRATEGIES, (1, 3), (1,), (False,)),
        *product(("infini",), STRATEGIES, (3,), (CONTEXT,), (False,)),
        *product(("infini",), STRATEGIES, (3,), (1, CONTEXT), (True,)),
    ]
    found = {"-".join(map(str, cell)): differences(*cell, ranks) for cell in cells}
    if ranks.is_rank0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave_together(ranks)


if __name__ == "__main__":
    main()
