"""Configurations and names, there and back; what the other side cannot express is named."""

from copy import deepcopy
from dataclasses import fields

import pytest
from transformers import LlamaConfig as TheirConfig

from infini_llama.model import hf
from infini_llama.model.config import HF_FIELDS, LlamaConfig
from support.models import small


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 1, "rope_theta": 5e5, "tie_word_embeddings": True},
        {"head_dim": 16},
        {
            "hidden_act": "gelu",
            "attention_dropout": 0.1,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ],
)
def test_export_and_import_round_trip(changes):
    ours = small(segment_length=64, **changes)
    assert hf.config_from_hf(hf.config_to_hf(ours)) == ours
    assert hf.config_from_hf(hf.config_to_infini_llama(ours)) == ours


def test_omitted_fields_have_hugging_faces_defaults():
    sizes = {
        name: value
        for name, value in small().to_dict().items()
        if HF_FIELDS.get(name, 0) is None
    }
    del sizes["num_key_value_heads"]
    ours, theirs = (
        hf.config_from_hf({"model_type": "llama"} | sizes),
        TheirConfig(**sizes),
    )
    for name in HF_FIELDS:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


def test_infini_attention_cannot_be_exported_as_plain_llama():
    with pytest.raises(ValueError, match="attention=infini"):
        hf.config_to_hf(small(attention="infini"))
    assert hf.config_from_hf(
        hf.config_to_infini_llama(small(attention="infini"))
    ) == small(attention="infini")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope_type='longrope'",
        ),
    ],
)
def test_unsupported_settings_of_a_hugging_face_model_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        hf.config_from_hf(hf.config_to_hf(small()) | changes)


OTHER = {
    "attention": "infini",
    "pre_norm": False,
    "qk_norm": True,
}


def test_every_field_is_carried_or_refused():
    """A field that is new in LlamaConfig fails here until it is known where it goes."""
    known = HF_FIELDS.keys() | hf.OTHER_KEYS | hf.TRAINING | hf.SEGMENTS | hf.NOT_STORED
    assert {field.name for field in fields(LlamaConfig)} - known == OTHER.keys()
    for name, value in OTHER.items():
        assert hf.beyond_llama(small(**{name: value})) == [f"{name}={value}"]


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scaled_rotary_positions_in_the_styles_of_transformers_4_and_5(kind):
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values = hf.config_to_hf(
        small(rope_scaling=scaling, rope_theta=5e5, segment_length=64)
    )
    five = {
        name: value
        for name, value in values.items()
        if name not in ("rope_theta", "rope_scaling")
    }
    four = {name: value for name, value in values.items() if name != "rope_parameters"}
    for style in (values, four, five):
        read = hf.config_from_hf(style)
        assert (read.rope_scaling, read.rope_theta) == (scaling, 5e5)
        parameters = TheirConfig(**deepcopy(style)).rope_parameters
        assert parameters["rope_theta"] == 5e5 and all(
            parameters[key] == value for key, value in scaling.items()
        )
