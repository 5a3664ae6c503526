"""Run once per worker: how long a training step takes under the settings of a plan, on random tokens."""

import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from infini_llama.tasks.train.worker.build import build_model
from infini_llama.tasks.train.worker.compiling import Compiled
from infini_llama.tasks.train.worker.optimizer import build_optimizer
from infini_llama.tasks.train.worker.step import train_step
from infini_llama.tasks.train.worker.strategies.native import LossModule, distribute
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


def try_steps(order: dict[str, Any], length: int, seconds: float) -> dict[str, float]:
    """The trainer's own steps of one micro-batch.

    Args:
        order: what `build_model` takes.
        length: tokens of a row.
        seconds: time to spend after the first step.

    Returns:
        {"first": seconds of the first step, "step": median of the others, "steps"}.
    """
    train, plan = order["config"]["train"], order["plan"]
    torch.set_num_threads(plan["threads"])
    ranks = Ranks(plan["device"], plan["distributed_backend"])
    model = build_model(order, ranks.device)
    ranks.share_rows(train["context_parallel"])
    module = LossModule(model, ranks.context)
    wrapped = distribute(module, train, ranks)
    optimizer = build_optimizer(model, train)
    if plan["compile"] != "off":
        Compiled(module, plan["compile"]).switch_on()
    half = torch.float16 if plan["precision"] == "fp16" else torch.bfloat16
    autocast = torch.autocast(ranks.device.type, dtype=half, enabled=plan["precision"] != "fp32")
    shape = (plan["micro_batch_size"], length)
    inputs, labels = (torch.randint(model.config.vocab_size, shape, device=ranks.device) for _ in range(2))
    targets = labels.numel() * ranks.groups

    def step() -> float:
        began = time.perf_counter()
        clip = train["max_grad_norm"]
        train_step(wrapped, optimizer, [(inputs, labels)], targets, clip, ranks, autocast, lambda: False)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    first = step()
    # All ranks have to make the same number of steps, so the first one decides it.
    count = torch.tensor([max(3, min(20, int(seconds / max(first, 1e-3))))], device=ranks.device)
    dist.broadcast(count, 0)
    times = [step() for _ in range(int(count))]
    ranks.leave()
    return {"first": first, "step": statistics.median(times), "steps": len(times)}


def main(case: str) -> None:
    print("\n" + json.dumps(try_steps(**json.loads(case))))
