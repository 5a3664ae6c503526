"""Arithmetic of training, for throughput as a share of what the machine can do."""

from model.config import LlamaConfig


def matrix_parameters(config: LlamaConfig) -> int:
    """Weights that every token is multiplied by: projections, feed-forward and head; not the embedding's look-up."""
    width, head = config.hidden_size, config.head_dim
    attention = width * head * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    return config.num_hidden_layers * (attention + 3 * width * config.intermediate_size) + width * config.vocab_size


def flops_per_token(config: LlamaConfig, sequence_length: int) -> float:
    """Floating-point operations a token, forward and backward (twice the forward).

    Weights: 6 each (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). Softmax attention: QK^T and AV over the T/2 tokens that
    a causal query sees on average. Infini: the same inside a segment of N, and 2 d^2 each for reading (a query head) and writing
    (a key-value head) the memory; a row of at most N tokens uses no memory.
    """
    size, window = config.head_dim, sequence_length
    memory = 0.0
    if config.attention == "infini" and sequence_length > config.segment_length:
        window = config.segment_length
        memory = 2.0 * size * size * (config.num_attention_heads + config.num_key_value_heads)
    local = 2.0 * 2.0 * (window / 2) * size * config.num_attention_heads
    return 6.0 * matrix_parameters(config) + 3.0 * config.num_hidden_layers * (local + memory)
