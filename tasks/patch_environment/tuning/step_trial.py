"""Run in a child process, once a worker: how long a training step takes under the settings of a plan, on made-up tokens."""

import json
import os
import statistics
import time
from typing import Any


def try_steps(case: dict[str, Any]) -> dict[str, float]:
    """Forward, backward, clip and AdamW at the run's shapes.

    Args:
        case: {"model": LlamaConfig's fields, "micro_batch_size", "length", "precision", "attention_backend", "threads", "device",
            "compile", "loss_chunk", "activation_checkpointing", "seconds": time to spend after the first step}.

    Returns:
        {"first": seconds of the first step, "step": median of the others, "steps"}.
    """
    import torch
    import torch.distributed as dist

    from infini_llama.model.config import LlamaConfig
    from infini_llama.model.llama import Llama

    torch.set_num_threads(case["threads"])
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", rank) if case["device"] == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    config = LlamaConfig.from_dict(case["model"])
    model = Llama(config, case["attention_backend"]).to(device)
    model.loss_chunk = case["loss_chunk"]
    model.checkpoint_activations(case["activation_checkpointing"])
    if world_size > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    forward: Any = lambda inputs, labels: model.loss(inputs, labels)[0]  # noqa: E731
    if case["compile"] == "block":
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)
    elif case["compile"] == "whole":
        forward = torch.compile(forward, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (case["micro_batch_size"], case["length"])
    inputs, labels = (torch.randint(config.vocab_size, shape, device=device) for _ in range(2))

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=case["precision"] == "bf16"):
            loss = forward(inputs, labels)
        (loss / labels.numel()).backward()
        if world_size > 1:
            flat = torch.cat(
                [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
            )
            dist.all_reduce(flat)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    began = time.perf_counter()
    step()
    first, times = time.perf_counter() - began, []
    # All ranks have to make the same number of steps, so that number is decided by the first's time alone.
    count = torch.tensor([max(3, min(20, int(case["seconds"] / max(first, 1e-3))))])
    if world_size > 1:
        dist.broadcast(count, 0)
    for _ in range(int(count)):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    if world_size > 1:
        dist.destroy_process_group()
    return {"first": first, "step": statistics.median(times), "steps": len(times)}


def main(case: str) -> None:
    print("\n" + json.dumps(try_steps(json.loads(case))))
