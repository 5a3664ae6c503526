"""Arithmetic of training, for throughput as a share of what the machine can do."""

from infini_llama.model.config import LlamaConfig


def parameters(config: LlamaConfig) -> int:
    """All weights: of matrices, the embedding where the head has a matrix of its own, norms and gates."""
    norms = 2 * config.hidden_size + (2 * config.head_size if config.qk_norm else 0)
    gates = config.num_attention_heads if config.attention == "infini" else 0
    embedding = 0 if config.tie_word_embeddings else config.padded_vocab_size * config.hidden_size
    rest = config.num_hidden_layers * (norms + gates) + config.hidden_size
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    return matrix_parameters(config) + padding + embedding + rest


def matrix_parameters(config: LlamaConfig) -> int:
    """Weights that every token is multiplied by: projections, feed-forward and head; the embedding is only looked up."""
    width = config.hidden_size
    q_width, kv_width = (n * config.head_size for n in (config.num_attention_heads, config.num_key_value_heads))
    layer = 2 * width * q_width + 2 * width * kv_width + 3 * width * config.intermediate_size
    return config.num_hidden_layers * layer + config.vocab_size * width


def attention_flops(config: LlamaConfig, sequence_length: int) -> float:
    """Multiplications and additions of one layer's attention, forward, over one row.

    Causal pairs alone are counted, each 2 d for Q K^T and 2 d for A V a query head. The memory: 2 d (d + 1) a token and query
    head to read (numerator and denominator), 2 d d a token and key-value head to write; the first segment does not read,
    the last does not write. A delta update adds 2 d (d + 1) a written token and 2 d^3 a segment and key-value head.
    """
    size, window = config.head_size, sequence_length
    if config.attention != "softmax":
        window = min(window, config.segment_length)
    full, tail = divmod(sequence_length, window)
    pairs = full * window * (window + 1) / 2 + tail * (tail + 1) / 2
    local = 4.0 * size * config.num_attention_heads * pairs
    if config.attention != "infini":
        return local
    writing = full if tail else full - 1  # segments
    read = 2.0 * size * (size + 1) * config.num_attention_heads * (sequence_length - window)
    write = 2.0 * size * size * config.num_key_value_heads * writing * window
    if config.memory_update != "linear" and writing > 1:  # the first finds nothing that it could take out
        write += 2.0 * size * config.num_key_value_heads * (writing - 1) * (window * (size + 1) + size * size)
    return local + read + write


def flops_per_token(config: LlamaConfig, sequence_length: int) -> float:
    """Floating-point operations a token, forward and backward, in rows of `sequence_length` tokens.

    6 for each weight of a matrix (Kaplan et al. 2020, arXiv 2001.08361, section 2.1: 2 forward, 4 backward), and three times
    the attention's forward.
    """
    attention = config.num_hidden_layers * attention_flops(config, sequence_length) / sequence_length
    return 6.0 * matrix_parameters(config) + 3.0 * attention
