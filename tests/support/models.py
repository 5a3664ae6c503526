"""A model of two layers that a test runs in milliseconds, and its text."""

from typing import Any

from infini_llama.model.config import LlamaConfig
from infini_llama.model.generate import Sampling, generate_batch
from infini_llama.model.llama import Llama


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


GREEDY = Sampling()


def generate(
    model: Llama,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_id: int | None = None,
) -> list[int]:
    """New tokens after one prompt; `stop_id` ends the text and is not returned."""
    steps = generate_batch(
        model, [prompt], max_new_tokens, sampling, lambda _row, token: token == stop_id
    )
    return [
        token
        for step in steps
        for token in step
        if token is not None and token != stop_id
    ]
