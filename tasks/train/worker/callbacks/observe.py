"""What is looked at only in steps that are logged, since it costs transfers and, where the model is sharded, communication."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.strategies.native import local_part, replica_of, whole
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


def gate_means(model: Llama, ranks: Ranks) -> list[float]:
    """Mean share of memory in the output of each layer's heads; empty without Infini-attention. Every rank has to ask."""
    gates = [value.detach() for name, value in model.named_parameters() if name.endswith(".gate")]
    if not gates:
        return []
    shares = torch.stack([local_part(gate).sigmoid().sum() / gate.numel() for gate in gates]).tolist()
    if not isinstance(gates[0], DTensor):
        return shares
    copies = replica_of(gates[0], ranks)[1]
    return ranks.sum(*(share / copies for share in shares))


def parameter_norm(model: nn.Module) -> float:
    """2-norm of all parameters as one vector. Every rank has to ask."""
    return whole(nn.utils.get_total_norm([value.detach() for value in model.parameters()])).item()
