"""Which part of each parameter a rank has where several share a model (train.tensor_parallel; `model.split`)."""

import logging

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from infini_llama.model.llama import Llama
from infini_llama.model.split import Split

log = logging.getLogger("infini_llama.worker")
# Queries, keys and values come out by heads, the MLP's inside by columns: rows of the weights that make them, columns of those that
# read them. What is not named here is whole on every rank.
ROWS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "self_attn.gate", "gate_proj.weight", "up_proj.weight")
COLUMNS = ("o_proj.weight", "down_proj.weight")
WORDS = ("embed_tokens.weight", "lm_head.weight")


def split_model(model: Llama, mesh: DeviceMesh) -> None:
    """Replaces the parameters by DTensors over the ranks of `mesh`, of which each keeps its part; names and whole shapes stay.

    Every rank has to have built the same model.
    """
    model.compute_with(Split(mesh.get_group(), mesh.get_local_rank(), mesh.size()))
    if model.words is None:
        words = model.config.vocab_size
        log.info(
            "a vocabulary of %d is not split over %d workers: each has all of embedding and head", words, mesh.size()
        )
    # Norms and whole tensors are gathered over one dimension of ranks after the other, of which it would warn as slow.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            place = placement(f"{prefix}.{name}", words=model.words is not None)
            part = distribute_tensor(parameter.detach(), mesh, [place], src_data_rank=None)
            setattr(module, name, nn.Parameter(part))
    model.tie_weights()


def placement(name: str, words: bool) -> Placement:
    """How the parameter `name` lies on the ranks; `words`: whether embedding and head are split."""
    if name.endswith(ROWS) or (words and name.endswith(WORDS)):
        return Shard(0)
    return Shard(1) if name.endswith(COLUMNS) else Replicate()
