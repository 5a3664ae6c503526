"""A model of two layers that a test runs in milliseconds."""

from typing import Any

from infini_llama.model.config import LlamaConfig


def small(**changes: Any) -> LlamaConfig:
    """A model of two layers that a test runs in milliseconds."""
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "segment_length": 8,
    }
    return LlamaConfig(**(fields | changes))
