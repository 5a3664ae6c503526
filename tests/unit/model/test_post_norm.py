"""Post-norm, norm(x + f(x)) (Vaswani et al. 2017, arXiv 1706.03762, section 3.1), against a literal layer in fp64."""

import math

import pytest
import torch

from infini_llama.model.llama import Llama
from support.differences import relative
from support.literal_infini import turned
from support.models import small


def literal_norm(x, weight, eps):
    return weight * x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def literal_attention(x, weights, config):
    """One row x [T, hidden_size]: each head by itself, query head h with key-value head h // (H / Hkv)."""
    size, group = (
        config.head_size,
        config.num_attention_heads // config.num_key_value_heads,
    )
    q, k, v = (x @ weights[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    heads = []
    for head in range(config.num_attention_heads):
        mine, shared = (
            slice(number * size, (number + 1) * size)
            for number in (head, head // group)
        )
        scores = (
            turned(q[:, mine], config.rope_theta)
            @ turned(k[:, shared], config.rope_theta).T
            / math.sqrt(size)
        )
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(later, -math.inf).softmax(dim=1) @ v[:, shared])
    return torch.cat(heads, dim=1) @ weights["self_attn.o_proj.weight"].T


def literal_mlp(x, weights):
    gate, up, down = (
        weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    inner = x @ gate.T
    return (inner * inner.sigmoid() * (x @ up.T)) @ down.T


def literal_logits(model, row):
    """Logits [T, vocab_size] of one row of ids."""
    config, state = model.config, dict(model.named_parameters())
    x = state["model.embed_tokens.weight"][row]
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        weights = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix)
        }
        first, second = (
            weights["input_layernorm.weight"],
            weights["post_attention_layernorm.weight"],
        )
        x = literal_norm(
            x + literal_attention(x, weights, config), first, config.rms_norm_eps
        )
        x = literal_norm(x + literal_mlp(x, weights), second, config.rms_norm_eps)
    return (
        literal_norm(x, state["model.norm.weight"], config.rms_norm_eps)
        @ state["lm_head.weight"].T
    )


@pytest.fixture
def model():
    """Norms are not all ones, so that one in a wrong place shows."""
    model = Llama(small(pre_norm=False, rope_theta=100.0)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model


def test_logits_and_gradients_are_those_of_the_literal_layer(model):
    ids, labels = torch.randint(0, 97, (2, 21)), torch.randint(0, 97, (42,))
    literal, logits = (
        torch.stack([literal_logits(model, row) for row in ids]),
        model(ids),
    )
    assert relative(logits, literal) < 1e-12
    parameters = list(model.parameters())
    pair = (
        torch.autograd.grad(
            torch.nn.functional.cross_entropy(x.flatten(0, 1), labels), parameters
        )
        for x in (logits, literal)
    )
    for gradient, expected in zip(*pair, strict=True):
        assert relative(gradient, expected) < 1e-10
