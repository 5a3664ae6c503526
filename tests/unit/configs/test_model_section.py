"""The model's section says what model.config knows."""

from dataclasses import MISSING, fields

from infini_llama.configs.schema import ModelConfig
from infini_llama.model.config import LlamaConfig


def test_it_has_the_fields_and_defaults_of_the_model():
    theirs = {field.name: field.default for field in fields(LlamaConfig)}
    ours = {name: field.default for name, field in ModelConfig.model_fields.items()}
    assert ours.keys() == theirs.keys() - {"vocab_size", "max_position_embeddings"}
    for name, default in ours.items():
        assert theirs[name] is MISSING or theirs[name] == default, name
