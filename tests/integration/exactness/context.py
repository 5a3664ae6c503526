"""What torchrun starts for test_context_parallel.py: ranks that share rows against one process that has them whole (fp64)."""

import faulthandler
import json
import os
import sys
from itertools import cycle, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from infini_llama.model.config import LlamaConfig
from infini_llama.model.context import Context
from infini_llama.model.llama import Llama

N, ROW = 4, 32
PADDED = [(0, 9), (1, 14), (-1, 9)], [(-1, 5), (0, 7), (1, 20)]
PACKED = [(0, 3), (1, 17), (2, 12)], [(5, 16), (6, 16)]
ROWS: dict[str, dict] = {
    "whole": {},
    "ragged": {"length": ROW - N - 3},
    "documents": {"documents": PACKED},
    "padding": {"documents": PADDED},
    "recomputed": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "chunks": {"loss_chunk": 5},
    "maps": {"memory_maps": True},
}


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def differences(
    update: str, kind: str, group: dist.ProcessGroup, size: int
) -> dict[str, float]:
    """The largest differences of this rank's logits, and of the gradients summed over the ranks of the row."""
    options = dict(ROWS[kind])
    length, documents = options.pop("length", ROW), options.pop("documents", None)
    checkpointing, chunk = (
        options.pop("checkpointing", "none"),
        options.pop("loss_chunk", 0),
    )
    config = LlamaConfig(
        61,
        32,
        36,
        2,
        4,
        2,
        ROW,
        attention="infini",
        segment_length=N,
        memory_update=update,
        **options,
    )
    torch.manual_seed(0)
    model = Llama(config).double()
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.gate)
    for name, parameter in model.named_parameters():
        if ".memory_" in name:
            nn.init.normal_(parameter, 0, 0.5)
    generator = torch.Generator().manual_seed(3)
    ids, labels = (
        torch.randint(0, 61, (2, length), generator=generator) for _ in range(2)
    )
    labels[0, :7] = -100
    if documents is not None:
        documents = torch.tensor(
            [[name for name, count in row for _ in range(count)] for row in documents]
        )
    logits = model(ids, documents)
    expected_loss, expected_count = model.loss(ids, labels, documents)
    expected_loss.backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    model.checkpoint_activations(checkpointing)
    model.loss_chunk = chunk
    context = Context(group, dist.get_rank(group), size)
    mine = [context.part(x, N) for x in (ids, labels)]
    found = {
        "logits": largest(model(mine[0], documents, context), context.part(logits, N))
    }
    loss, count = model.loss(*mine, documents, context)
    loss.backward()
    for value in model.parameters():
        dist.all_reduce(value.grad, group=group)
    totals = torch.stack((loss.detach(), count.double()))
    dist.all_reduce(totals, group=group)
    assert totals[1] == expected_count
    found["loss"] = largest(totals[0], expected_loss)
    found["gradients"] = max(
        largest(value.grad, expected[name]) for name, value in model.named_parameters()
    )
    found["gates"] = max(
        largest(value.grad, expected[name])
        for name, value in model.named_parameters()
        if name.endswith("gate")
    )
    return found


def main() -> None:
    faulthandler.enable()  # the other ranks report a lost connection only
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {2: dist.new_subgroups(2)[0], 4: dist.new_subgroups(4)[0]}
    found = {}
    updates = ("linear", "delta", "delta_bounded")
    some = zip(cycle(updates), ROWS, cycle(groups), strict=False)
    for update, kind, size in (
        product(updates, ROWS, groups) if sys.argv[2] == "all" else some
    ):
        worst = torch.tensor([*differences(update, kind, groups[size], size).values()])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found[f"{update}-{kind}-{size}"] = worst.max().item()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
