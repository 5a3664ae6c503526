"""What a finished run leaves beside its checkpoints: result.json with hashes of its state and texts by its model."""

import json
from pathlib import Path

import torch

from infini_llama.model.llama import Llama
from infini_llama.tasks.storage.artifacts import write_atomic
from infini_llama.tasks.train.worker import checkpoint
from infini_llama.tasks.train.worker.callbacks.sample import prompts_of, sample_texts
from infini_llama.tasks.train.worker.strategies.native import gathered
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


def write_result(order: dict, model: Llama, state: dict[str, torch.Tensor], step: int, ranks: Ranks) -> None:
    """Called by all ranks, since each may hold a share of the model; the first one writes."""
    train = order["config"]["train"]
    weights, moments = checkpoint.state_hash(state, "model."), checkpoint.state_hash(state, "optimizer.")
    finished = gathered(model, ranks)
    if finished is not None:
        dataset = Path(order["dataset"])
        sample, *samples = sample_texts(finished, dataset, prompts_of(train), train["sample_tokens"], train["seed"])
        result = {
            "steps": step,
            "stopped_early": train["early_stopping_patience"] if step < train["max_steps"] else None,
            "parameters": sum(parameter.numel() for parameter in finished.parameters()),
            "weights_sha256": weights,
            "optimizer_sha256": moments,
            "sample": sample,
            "samples": samples,
        }
        write_atomic(Path(order["run_dir"]) / "result.json", json.dumps(result, indent=1))
    ranks.barrier()
