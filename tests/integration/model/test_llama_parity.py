"""Logits and gradients against transformers' LlamaForCausalLM, weights copied by state_dict."""

import pytest
import torch
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from infini_llama.model.llama import Llama
from support.differences import relative
from support.models import small

SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
)


def theirs_of(config):
    fields = {name: getattr(config, name) for name in SHARED}
    scaling = {"rope_type": "default", "rope_theta": config.rope_theta} | (
        config.rope_scaling or {}
    )
    theirs = LlamaForCausalLM(
        TheirConfig(**fields, rope_parameters=scaling, hidden_act=config.hidden_act)
    )
    theirs.set_attn_implementation("sdpa")
    return theirs


def pair(config, dtype):
    """Our model and theirs with the same weights; norms are not all ones, so that a missing one shows."""
    ours, theirs = Llama(config).to(dtype), theirs_of(config).to(dtype)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def assert_equal(ours, theirs, length, tolerance):
    ids, labels = torch.randint(0, 97, (2, length)), torch.randint(0, 97, (2, length))
    a, b = ours(ids), theirs(input_ids=ids, use_cache=False).logits
    assert relative(a, b) < tolerance
    for logits in (a, b):
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten()
        ).backward()
    named = dict(theirs.named_parameters())
    assert named.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert relative(parameter.grad, named[name].grad) < tolerance, name


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)]
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_equals_transformers(kv_heads, tied, dtype, tolerance):
    settings = small(
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        rope_theta=500.0,
        initializer_range=0.1,
    )
    assert_equal(*pair(settings, dtype), length=33, tolerance=tolerance)


SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn of other ramps": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
    },
    "yarn of a ramp before all frequencies": {
        "factor": 4.0,
        "original_max_position_embeddings": 1,
    },
    "yarn of a ramp after all frequencies": {
        "factor": 4.0,
        "original_max_position_embeddings": 10**8,
    },
    "yarn of a given scale": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 0.7,
    },
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)]
)
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_positions_equal_transformers(name, dtype, tolerance):
    scaling = {"rope_type": name.split()[0]} | SCALINGS[name]
    settings = small(
        rope_scaling=scaling, rope_theta=500.0, initializer_range=0.1, hidden_size=64
    )
    assert_equal(*pair(settings, dtype), length=33, tolerance=tolerance)


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh"])
def test_other_activations_equal_transformers(hidden_act):
    assert_equal(
        *pair(small(hidden_act=hidden_act, initializer_range=0.1), torch.float32),
        length=33,
        tolerance=1e-5,
    )


@pytest.mark.parametrize(
    ("scaling", "word"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        (
            SCALINGS["llama3"] | {"rope_type": "llama3", "low_freq_factor": 4.0},
            "low_freq_factor",
        ),
        (
            SCALINGS["yarn"] | {"rope_type": "yarn", "beta_fast": 1, "beta_slow": 32},
            r"beta_fast=1\.0.*beta_slow=32\.0",
        ),
        (
            SCALINGS["yarn"] | {"rope_type": "yarn", "attention_factor": [1]},
            r"attention_factor=\[1\]",
        ),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan"),
        ([1], r"rope_scaling=\[1\]"),
    ],
)
def test_impossible_scalings_are_refused(scaling, word):
    with pytest.raises(ValueError, match=word):
        Llama(small(rope_scaling=scaling))


def test_equals_transformers_to_the_last_digits_of_fp64(monkeypatch):
    """Their norms and rotary tables are rounded to fp32; without that the two agree to fp64's precision."""

    def norm(self, x):
        return (
            self.weight
            * x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    def tables(self, x, position_ids):
        base, size = (
            self.config.rope_parameters["rope_theta"],
            self.config.hidden_size // 4,
        )
        frequencies = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = (position_ids[..., None].double() * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", tables)
    assert_equal(*pair(small(), torch.float64), length=33, tolerance=1e-11)
