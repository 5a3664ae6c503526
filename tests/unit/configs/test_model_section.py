"""The model's section says what model.config knows, and refuses rotary scalings that lack something."""

from dataclasses import MISSING, fields

import pytest
from pydantic import ValidationError

from infini_llama.configs.schema import ModelConfig
from infini_llama.model.config import LlamaConfig


def test_it_has_the_fields_and_defaults_of_the_model():
    theirs = {field.name: field.default for field in fields(LlamaConfig)}
    ours = {name: field.default for name, field in ModelConfig.model_fields.items()}
    assert ours.keys() == theirs.keys() - {"vocab_size", "max_position_embeddings"}
    for name, default in ours.items():
        assert theirs[name] is MISSING or theirs[name] == default, name


@pytest.mark.parametrize(
    ("scaling", "word"),
    [
        ({"rope_type": "dynamic", "factor": 2}, "rope_type"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "yarn", "factor": 2}, "original_max_position_embeddings"),
        ({"rope_type": "llama3", "factor": 2, "original_max_position_embeddings": 64}, "low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 2, "original_max_position_embeddings": 64}
            | {"low_freq_factor": 4, "high_freq_factor": 1},
            "must be less than",
        ),
    ],
)
def test_wrong_scalings_are_refused(scaling, word):
    with pytest.raises(ValidationError, match=word):
        ModelConfig(rope_scaling=scaling)
