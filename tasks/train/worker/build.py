"""The model of a run, as its order says: architecture, first weights, and how its loss and gradient are computed."""

from pathlib import Path

import torch

from model.config import LlamaConfig
from model.llama import Llama
from tasks.train.worker.pretrained import load_pretrained

# Bytes of fp32 logits of one micro-batch from which `loss_chunk: auto` computes them in parts; measured in benchmarks/loss.py.
LARGE = {"cpu": 32 * 2**20, "cuda": 2**30}
TOKENS = {"cpu": 256, "cuda": 4096}


def build_model(order: dict, device: torch.device) -> Llama:
    """Initial weights depend on train.seed alone, which is taken as torch's global seed."""
    train = order["config"]["train"]
    torch.manual_seed(train["seed"])
    model = Llama(LlamaConfig.from_dict(order["model"]), order["plan"]["attention_backend"]).to(device)
    if order["init_from"]:
        load_pretrained(model, Path(order["init_from"]), train["init_gate"])
    save_memory(model, train, order["sequence_length"], device.type)
    return model


def save_memory(model: Llama, train: dict, sequence_length: int, device: str) -> None:
    """What a step keeps and what it computes in parts or again."""
    model.loss_chunk = loss_chunk(train, model.config, sequence_length, device)
    model.z_loss = train["z_loss"]
    model.checkpoint_activations(train["activation_checkpointing"])


def loss_chunk(train: dict, config: LlamaConfig, sequence_length: int, device: str) -> int:
    """Tokens whose logits exist at a time; 0: all of a micro-batch."""
    if train["loss_chunk"] != "auto":
        return train["loss_chunk"]
    logits = train["micro_batch_size"] * sequence_length * config.vocab_size * 4
    return TOKENS[device] if logits > LARGE[device] else 0
