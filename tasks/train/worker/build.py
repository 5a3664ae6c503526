"""The model of a run, as its order says: architecture, first weights, and how its loss and gradient are computed."""

from pathlib import Path

import torch

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.pretrained import load_pretrained


def build_model(order: dict, device: torch.device) -> Llama:
    """Initial weights depend on train.seed alone, which is taken as torch's global seed."""
    train = order["config"]["train"]
    torch.manual_seed(train["seed"])
    model = Llama(LlamaConfig.from_dict(order["model"]), order["plan"]["attention_backend"]).to(device)
    if order["init_from"]:
        load_pretrained(model, Path(order["init_from"]), train["init_gate"])
    save_memory(model, train, order["plan"]["loss_chunk"])
    return model


def save_memory(model: Llama, train: dict, loss_chunk: int) -> None:
    """What a step keeps and what it computes in parts or again."""
    model.loss_chunk = loss_chunk
    model.z_loss = train["z_loss"]
    model.checkpoint_activations(train["activation_checkpointing"])
