"""A model of two layers that a test runs in milliseconds."""

from typing import Any

import pytest
import torch

from infini_llama.model.config import LlamaConfig


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


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


@pytest.fixture
def config():
    return small
