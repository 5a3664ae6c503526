"""Which parameters ranks that share a model split, and how."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.tensor import placement


@pytest.mark.parametrize("words", [True, False])
def test_all_parameters_but_norms_are_split(words):
    with torch.device("meta"):
        model = Llama(LlamaConfig(64, 32, 48, 1, 4, 2, 16, attention="infini", qk_norm=True, tie_word_embeddings=False))
    whole = {name for name, _ in model.named_parameters() if placement(name, words) == Replicate()}
    norms = {f"{name}.weight" for name, module in model.named_modules() if name.endswith("norm")}
    assert whole == norms | (set() if words else {"model.embed_tokens.weight", "lm_head.weight"})
    layer = "model.layers.0."
    heads, inner = f"{layer}self_attn.", f"{layer}mlp."
    for name in (f"{heads}gate", f"{heads}k_proj.weight", f"{inner}up_proj.weight"):
        assert placement(name, words) == Shard(0)
    for name in (f"{heads}o_proj.weight", f"{inner}down_proj.weight"):
        assert placement(name, words) == Shard(1)
