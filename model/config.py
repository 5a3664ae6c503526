"""The architecture of a model, in the field names of Hugging Face's LlamaConfig where it has them.

The parameters and floating-point operations that follow from it are computed here too.
"""

import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeGuard, get_args

Attention = Literal["softmax", "local", "infini"]
MemoryUpdate = Literal["linear", "delta", "delta_bounded"]
Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]
# What training leaves as it is: the embedding, a head that is tied to it and the first layers, 0
# nothing; or everything but the attention (projections, their norms, gates and maps) of the layers
# that have a memory.
FrozenLayers = int | Literal["all_but_memory"]
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "segment_length",
    "pad_vocab_to_multiple_of",
)
# Largest value of a size: products of two can be counted.
LARGEST = 2**31 - 1
# Tokens of a text that all of its segments see, with attend_previous_segment: the number of Xiao et
# al. 2023, arXiv 2309.17453.
ATTENTION_SINKS = 4

# Parameters with a row per token of the vocabulary, and rows that pad it.
BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
# Fields of the same name and meaning in Hugging Face's LlamaConfig, with its default where a
# config.json may leave them out.
HF_FIELDS = {
    "vocab_size": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class LlamaConfig:
    """The architecture of a Llama or Infini-Llama: its parameters and its function follow from it.

    Attributes:
        vocab_size: tokens of the tokenizer, and so the width of the logits.
        pad_vocab_to_multiple_of: embedding and head have `padded_vocab_size` rows, the next
            multiple of it; the rows beyond vocab_size are zeros, which nothing reads and no
            gradient reaches.
        head_dim: width of a head; None: hidden_size / num_attention_heads. `head_size` is the
            resolved one. Infini-attention's memory has head_dim x head_dim entries per key-value
            head.
        max_position_embeddings: the length it is trained at, kept for Hugging Face's readers:
            nothing here depends on it.
        rope_scaling: as Hugging Face's, {"rope_type": "linear" | "llama3" | "yarn", "factor": …};
            None is plain RoPE.
        hidden_act: of the gated feed-forward block; silu makes it SwiGLU, gelu GeGLU.
        pre_norm: x + f(norm(x)); else norm(x + f(x)), as in Vaswani et al. 2017.
        qk_norm: an RMSNorm over each head's query and key before they are rotated or remembered.
        attention: softmax over the whole row; local: over segments of segment_length alone; infini:
            those and a memory.
        memory_layers: layers, from 0 and ascending, whose attention: infini has a memory and gates;
            the others have local attention over the same segments. None: all layers. Without effect
            on other attention.
        memory_update: eq. 8 (linear) or eq. 9 (delta) of the paper; delta_bounded divides by the
            sum of keys with the current segment's (`model.memory.memories`).
        memory_write_jitter: in training, what each segment writes is scaled by a random factor
            between 1 and at most this, so that a fact is also found among more that was written
            than the rows' other segments hold; 1: never. Not in the paper. The range of a step is
            set by `Llama.set_write_jitter`.
        memory_maps: the memory's queries and keys are affine maps of those of local attention, with
            weights of their own per head, see `infini_attention.HeadMaps`. Not in the paper.
            Without effect on other attention.
        attend_previous_segment: a segment's attention is also over the segment before it and the
            text's first tokens, see `attention_sinks`; its memory holds the segments before those.
            Not in the paper. Without effect on softmax.

    Raises:
        ValueError: heads do not divide the width or each other, or a field has a value outside its
            choices.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    attention: Attention = "softmax"
    segment_length: int = 64
    rope_scaling: dict[str, Any] | None = None
    hidden_act: Activation = "silu"
    pre_norm: bool = True
    qk_norm: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    memory_update: MemoryUpdate = "linear"
    memory_write_jitter: float = 1.0
    memory_layers: tuple[int, ...] | None = None
    memory_maps: bool = False
    attend_previous_segment: bool = False
    head_dim: int | None = None
    pad_vocab_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        # values of a config.json have any type
        for field in SIZES:
            value = getattr(self, field)
            if type(value) is not int or not 1 <= value <= LARGEST:
                raise ValueError(
                    f"{field}={value!r} is not a whole number from 1 to {LARGEST}"
                )
        for field, lowest in (
            ("rope_theta", 0),
            ("rms_norm_eps", 0),
            ("initializer_range", -1),
        ):
            value = getattr(self, field)
            if not is_number(value) or value <= lowest:
                raise ValueError(f"{field}={value!r} is not a number above {lowest}")
        for field in (
            "tie_word_embeddings",
            "pre_norm",
            "qk_norm",
            "memory_maps",
            "attend_previous_segment",
        ):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise ValueError(f"{field}={value!r} is neither true nor false")
        size = self.head_dim
        if size is not None and (
            type(size) is not int or not 2 <= size <= LARGEST or size % 2
        ):
            raise ValueError(
                f"head_dim={size!r} is not an even number from 2 to {LARGEST}"
            )
        is_mapping = isinstance(self.rope_scaling, dict)
        if self.rope_scaling is not None and not is_mapping:
            raise ValueError(f"rope_scaling={self.rope_scaling!r} is not a mapping")
        self._check_heads()
        for field, choices in (
            ("attention", get_args(Attention)),
            ("memory_update", get_args(MemoryUpdate)),
            ("hidden_act", get_args(Activation)),
        ):
            if getattr(self, field) not in choices:
                raise ValueError(
                    f"{field}={getattr(self, field)!r} is not one of {', '.join(choices)}"
                )
        self._check_memory()
        for field in ("attention_dropout", "hidden_dropout"):
            value = getattr(self, field)
            if not is_number(value) or not 0 <= value < 1:
                raise ValueError(f"{field}={value!r} is outside [0, 1)")

    def _check_heads(self) -> None:
        """Check that heads divide the model's width evenly, and key-value heads the heads."""
        divided = self.hidden_size % self.num_attention_heads == 0
        if self.head_dim is None and (not divided or self.head_size % 2):
            raise ValueError(
                f"hidden_size={self.hidden_size} over "
                f"num_attention_heads={self.num_attention_heads} is not an even integer"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )

    def _check_memory(self) -> None:
        """Check the fields of the memory; the layers of a config.json are a list."""
        if not is_number(self.memory_write_jitter) or self.memory_write_jitter < 1:
            raise ValueError(
                f"memory_write_jitter={self.memory_write_jitter!r} is not a number of at least 1"
            )
        if self.memory_layers is None:
            return
        layers: tuple[Any, ...] = tuple(self.memory_layers)
        inside = all(
            type(layer) is int and 0 <= layer < self.num_hidden_layers
            for layer in layers
        )
        if not layers or not inside or list(layers) != sorted(set(layers)):
            raise ValueError(
                f"memory_layers={list(layers)} are not ascending numbers of layers, "
                f"each from 0 to {self.num_hidden_layers - 1}"
            )
        object.__setattr__(self, "memory_layers", layers)

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def attended_tokens(self, length: int) -> int:
        """Tokens inside which softmax attention is computed, in rows of `length` tokens."""
        return (
            length if self.attention == "softmax" else min(length, self.segment_length)
        )

    @property
    def sees_previous_segment(self) -> bool:
        """Whether there are segments, and each sees the one before it."""
        return self.attention != "softmax" and self.attend_previous_segment

    @property
    def attention_sinks(self) -> int:
        """First tokens of a text that all of its segments see; 0 where segments see no other."""
        return (
            min(ATTENTION_SINKS, self.segment_length)
            if self.sees_previous_segment
            else 0
        )

    @property
    def attended_segments(self) -> int:
        """Segments that attention is over. The memory that it reads holds those before them."""
        return 2 if self.sees_previous_segment else 1

    @property
    def unread_tokens(self) -> int:
        """Tokens of a text up to the first that reads a memory."""
        return self.attended_segments * self.segment_length

    def attended_pairs(self, length: int) -> float:
        """Pairs of a query and a key of softmax attention in a row of `length` tokens.

        Pairs that a causal mask hides are not counted.
        """
        size = self.attended_tokens(length)
        full, tail = divmod(length, size)
        pairs = full * size * (size + 1) / 2 + tail * (tail + 1) / 2
        if self.sees_previous_segment:
            pairs += (length - size) * size
            pairs += max(0, length - 2 * size) * self.attention_sinks
        return pairs

    @property
    def layers_with_memory(self) -> tuple[int, ...]:
        """Numbers of the layers that have a memory and gates; empty without Infini-attention."""
        if self.attention != "infini":
            return ()
        if self.memory_layers is None:
            return tuple(range(self.num_hidden_layers))
        return self.memory_layers

    @property
    def padded_vocab_size(self) -> int:
        """Rows of embedding and head."""
        return (
            -(-self.vocab_size // self.pad_vocab_to_multiple_of)
            * self.pad_vocab_to_multiple_of
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON has them: without tuples."""
        layers = None if self.memory_layers is None else list(self.memory_layers)
        return asdict(self) | {"memory_layers": layers}


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value of a JSON file is a finite number, as a float can hold it."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def parameters(config: LlamaConfig) -> int:
    """All weights: of matrices, an embedding that is not the head's matrix, norms and memories."""
    norms = 2 * config.hidden_size + (2 * config.head_size if config.qk_norm else 0)
    memories = memory_parameters(config) * len(config.layers_with_memory)
    embedding = (
        0
        if config.tie_word_embeddings
        else config.padded_vocab_size * config.hidden_size
    )
    rest = config.num_hidden_layers * norms + memories + config.hidden_size
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    return matrix_parameters(config) + padding + embedding + rest


def memory_parameters(config: LlamaConfig) -> int:
    """Weights that a memory adds to a layer: gates, and maps of queries and keys."""
    gates = config.num_attention_heads
    if not config.memory_maps:
        return gates
    heads = config.num_attention_heads + config.num_key_value_heads
    return gates + heads * config.head_size * (config.head_size + 1)


def matrix_parameters(config: LlamaConfig) -> int:
    """Weights that every token is multiplied by: projections, feed-forward and head.

    The embedding is not among them: it is only looked up.
    """
    return (
        config.num_hidden_layers * layer_matrix_parameters(config)
        + config.vocab_size * config.hidden_size
    )


def layer_matrix_parameters(config: LlamaConfig) -> int:
    """Weights of the matrices of one layer."""
    return (
        _query_key_value(config)
        + _attention_output(config)
        + 3 * config.hidden_size * config.intermediate_size
    )


def _query_key_value(config: LlamaConfig) -> int:
    return (
        config.hidden_size
        * (config.num_attention_heads + 2 * config.num_key_value_heads)
        * config.head_size
    )


def _attention_output(config: LlamaConfig) -> int:
    return config.hidden_size * config.num_attention_heads * config.head_size


def first_trained_layer(config: LlamaConfig, frozen: FrozenLayers) -> int:
    """Number of the layer at which the backward pass ends."""
    return config.layers_with_memory[0] if frozen == "all_but_memory" else frozen


def trained_layer_matrices(config: LlamaConfig, frozen: FrozenLayers) -> int:
    """Weights of the layers' matrices that have a gradient."""
    if frozen == "all_but_memory":
        attention = _query_key_value(config) + _attention_output(config)
        return len(config.layers_with_memory) * attention
    return (config.num_hidden_layers - frozen) * layer_matrix_parameters(config)


def trained_parameters(config: LlamaConfig, frozen: FrozenLayers) -> int:
    """Weights that have a gradient."""
    if frozen == "all_but_memory":
        others = memory_parameters(config) + (
            2 * config.head_size if config.qk_norm else 0
        )
        return (
            trained_layer_matrices(config, frozen)
            + len(config.layers_with_memory) * others
        )
    if not frozen:
        return parameters(config)
    rest = replace(
        config, num_hidden_layers=config.num_hidden_layers - frozen, memory_layers=None
    )
    with_memory = sum(layer >= frozen for layer in config.layers_with_memory)
    without = len(rest.layers_with_memory) - with_memory
    embedding = config.padded_vocab_size * config.hidden_size
    return parameters(rest) - embedding - without * memory_parameters(config)


def attention_flops(
    config: LlamaConfig, sequence_length: int, first_layer: int = 0
) -> float:
    """Multiplications and additions of the attention, forward, over one row.

    Those of all layers, or of the layers from `first_layer` on.

    Causal pairs alone are counted, each 2 d for Q K^T and 2 d for A V per query head. The memory:
    2 d (d + 1) per token and query head to read (numerator and denominator), 2 d d per token and
    key-value head to write; the first segment does not read, the last does not write (with
    attend_previous_segment the first two and the last two). A delta
    update adds 2 d (d + 1) per written token and 2 d^3 per segment and key-value head. Maps add
    2 d d per token and head that reads or writes.
    """
    size = config.head_size
    segment = config.attended_tokens(sequence_length)
    layers = config.num_hidden_layers - first_layer
    memories = sum(layer >= first_layer for layer in config.layers_with_memory)
    pairs = config.attended_pairs(sequence_length)
    local = 4.0 * size * config.num_attention_heads * pairs
    reading = max(0, sequence_length - config.attended_segments * segment)  # tokens
    writing = -(-reading // segment)  # segments
    mapped = size if config.memory_maps else 0
    per_query = size + 1 + mapped
    read = 2.0 * size * per_query * config.num_attention_heads * reading
    write = (
        2.0 * size * (size + mapped) * config.num_key_value_heads * writing * segment
    )
    # The first segment that writes finds nothing that it could take out.
    if config.memory_update != "linear" and writing > 1:
        taken_out = segment * (size + 1) + size * size
        write += 2.0 * size * config.num_key_value_heads * (writing - 1) * taken_out
    return layers * local + memories * (read + write)


def memory_activation_bytes(config: LlamaConfig, number_bytes: int) -> int:
    """Bytes per token that a layer with a memory keeps more than another for the backward pass.

    These are features, reads, memories and what is mapped, which are fp32.

    Args:
        number_bytes: of a number in the type computed in.
    """
    q_width = config.num_attention_heads * config.head_size
    kv_width = config.num_key_value_heads * config.head_size
    copies = 0 if number_bytes == 4 else 2
    per_token = 4 * ((2 + 2 * copies) * q_width + (2 + copies) * kv_width)
    if config.memory_maps:
        per_token += 4 * (q_width + kv_width)
    return (
        per_token + 3 * 4 * kv_width * (config.head_size + 1) // config.segment_length
    )


def attention_flops_per_token(
    config: LlamaConfig,
    sequence_length: int,
    first_trained: int,
) -> float:
    """Floating-point operations of the attention per token.

    Three times the forward pass, and once in layers below `first_trained`.
    """
    once = attention_flops(config, sequence_length, 0)
    again = attention_flops(config, sequence_length, first_trained)
    return (once + 2.0 * again) / sequence_length


def matrix_flops_per_token(config: LlamaConfig, frozen: FrozenLayers) -> float:
    """Floating-point operations of the matrices per token, forward and backward.

    6 for each weight (Kaplan et al. 2020, arXiv 2001.08361, section 2.1: 2 forward, 2 for the
    gradient of the input and 2 for that of the weight). Layers below the first that is trained have
    no backward pass.
    """
    layer = layer_matrix_parameters(config)
    layers = config.num_hidden_layers
    inputs = (layers - first_trained_layer(config, frozen)) * layer
    if frozen == "all_but_memory":
        # Their input needs no gradient: nothing below is trained.
        inputs -= _query_key_value(config)
    forward_and_backward = 2.0 * (
        layers * layer + inputs + trained_layer_matrices(config, frozen)
    )
    return forward_and_backward + head_flops_per_token(config, frozen)


def head_flops_per_token(config: LlamaConfig, frozen: FrozenLayers) -> float:
    """Floating-point operations of the head per token that has logits, forward and backward.

    A head that is frozen, by itself or with the embedding that it is tied to, has no gradient of
    its weights.
    """
    still = frozen == "all_but_memory" or (frozen > 0 and config.tie_word_embeddings)
    return config.vocab_size * config.hidden_size * (4.0 if still else 6.0)


def flops_per_token(
    config: LlamaConfig, sequence_length: int, frozen: FrozenLayers = 0
) -> float:
    """Floating-point operations per token, forward and backward, in rows of this many tokens.

    Those of the matrices and of the attention. All tokens have logits here: an upper bound where
    the loss leaves out tokens without a target, for each of which a step has `head_flops_per_token`
    less.
    """
    first_trained = first_trained_layer(config, frozen)
    attention = attention_flops_per_token(config, sequence_length, first_trained)
    return matrix_flops_per_token(config, frozen) + attention
