"""The architecture."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from infini_llama.configs.schema.section import Section, fixed
from infini_llama.model.config import LARGEST, Activation, Attention, MemoryUpdate

Size = Annotated[int, Field(ge=1, le=LARGEST)]


class RopeScaling(Section):
    """Scaling of rotary positions for sequences longer than those of an earlier training, as in
    Hugging Face's rope_scaling.
    """

    rope_type: Literal["linear", "llama3", "yarn"] = fixed(
        description="linear: divide all positions by the factor. llama3: scale only low "
        "frequencies. yarn: scale frequencies by their index."
    )
    factor: Annotated[float, Field(ge=1)] = fixed(
        description="Maximum sequence length relative to the earlier training."
    )
    original_max_position_embeddings: Size | None = fixed(
        default=None,
        description="Sequence length of the earlier training (llama3, yarn).",
    )
    low_freq_factor: Annotated[float, Field(gt=0)] | None = fixed(
        default=None,
        description="Frequencies with fewer turns than this over the original length are scaled "
        "(llama3).",
    )
    high_freq_factor: Annotated[float, Field(gt=0)] | None = fixed(
        default=None,
        description="Frequencies with more turns than this over the original length are kept "
        "(llama3).",
    )
    beta_fast: Annotated[float, Field(gt=0)] | None = fixed(
        default=None,
        description="Frequencies with more turns than this over the original length are kept "
        "(yarn). Default: 32.",
    )
    beta_slow: Annotated[float, Field(gt=0)] | None = fixed(
        default=None,
        description="Frequencies with fewer turns than this are scaled fully (yarn). Default: 1.",
    )
    attention_factor: Annotated[float, Field(gt=0)] | None = fixed(
        default=None,
        description="Factor of cosines and sines (yarn). Default: computed from the factor's "
        "logarithm.",
    )

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> RopeScaling:
        needed_by_type = {
            "linear": (),
            "llama3": (
                "original_max_position_embeddings",
                "low_freq_factor",
                "high_freq_factor",
            ),
            "yarn": ("original_max_position_embeddings",),
        }
        missing = [
            key for key in needed_by_type[self.rope_type] if getattr(self, key) is None
        ]
        if missing:
            raise ValueError(f"rope_type={self.rope_type} needs {', '.join(missing)}")
        low = self.low_freq_factor
        high = self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"low_freq_factor={low} must be less than high_freq_factor={high}"
            )
        fast = self.beta_fast or 32.0
        slow = self.beta_slow or 1.0
        if fast < slow:
            raise ValueError(f"beta_fast={fast} must be at least beta_slow={slow}")
        return self


class ModelConfig(Section):
    """The architecture, with the field names of Hugging Face's LlamaConfig."""

    hidden_size: Size = fixed(default=256, description="Width of the residual stream.")
    intermediate_size: Size = fixed(
        default=768, description="Inner width of the gated feed-forward block."
    )
    num_hidden_layers: Size = fixed(default=4, description="Number of decoder layers.")
    num_attention_heads: Size = fixed(
        default=4,
        description="Query heads. Must divide hidden_size, unless model.head_dim is set.",
    )
    num_key_value_heads: Size | None = fixed(
        default=None,
        description="Key and value heads (grouped-query attention). Must divide "
        "num_attention_heads. Default: num_attention_heads.",
    )
    head_dim: Annotated[int, Field(ge=2, le=LARGEST, multiple_of=2)] | None = fixed(
        default=None,
        description="Width of a head. Infini-attention's memory has head_dim x head_dim entries "
        "per key-value head, so this is its capacity. Default: hidden_size / num_attention_heads.",
    )
    rope_theta: Annotated[float, Field(gt=0)] = fixed(
        default=10_000.0, description="Base of the rotary frequencies."
    )
    rms_norm_eps: Annotated[float, Field(gt=0)] = fixed(
        default=1e-5, description="Epsilon of RMSNorm."
    )
    initializer_range: Annotated[float, Field(gt=0)] = fixed(
        default=0.02, description="Standard deviation of the initial weights."
    )
    tie_word_embeddings: bool = fixed(
        default=True,
        description="Use the input embedding as the weight of the output head.",
    )
    rope_scaling: RopeScaling | None = fixed(
        default=None,
        description="Scaling of rotary positions, as in Hugging Face's configurations.",
    )
    pad_vocab_to_multiple_of: Size = fixed(
        default=1,
        description="Embedding and output head have as many rows as the next multiple of this "
        "number, for example 128 for fast matrix products on GPUs. The rows beyond the tokenizer's "
        "vocabulary stay zero, and are never sampled, part of the loss, or exported. 1: no "
        "padding.",
    )
    hidden_act: Activation = fixed(
        default="silu",
        description="Activation of the gated feed-forward block: silu is SwiGLU, gelu is GeGLU.",
    )
    pre_norm: bool = fixed(
        default=True,
        description="Normalize the input of each block (pre-norm). false: normalize its sum with "
        "the residual stream (post-norm).",
    )
    qk_norm: bool = fixed(
        default=False,
        description="Apply RMSNorm to the queries and keys of each head, before rotary positions.",
    )
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] = fixed(
        default=0.0, description="Dropout of attention weights in training."
    )
    hidden_dropout: Annotated[float, Field(ge=0, lt=1)] = fixed(
        default=0.0, description="Dropout of the output of each block in training."
    )
    attention: Attention = fixed(
        default="softmax",
        description="softmax: causal attention over the sequence. local: inside segments only. "
        "infini: inside segments plus a compressive memory of earlier ones (Munkhdalai et al. "
        "2024, arXiv 2404.07143).",
    )
    segment_length: Size = fixed(
        default=64, description="Tokens per segment (attention: infini or local)."
    )
    memory_layers: list[Annotated[int, Field(ge=0)]] | None = fixed(
        default=None,
        description="Layers, from 0, that have a memory and gates (attention: infini), in "
        "ascending order. The others have local attention over the same segments. Default: all "
        "layers.",
        min_length=1,
    )
    memory_update: MemoryUpdate = fixed(
        default="linear",
        description="linear: add each segment's keys and values (equation 8 of the paper). delta: "
        "first subtract what the memory already returns for these keys (equation 9). "
        "delta_bounded: delta with a denominator that keeps the memory bounded after short "
        "segments.",
    )
    memory_maps: bool = fixed(
        default=False,
        description="Give the memory queries and keys of its own: each head's are multiplied by a "
        "trained matrix of head_dim x head_dim and shifted by a trained vector, before they read "
        "or are written. Local attention keeps its own. Matrices start as the identity, and "
        "vectors as 0, also for weights of train.init_from without them. Not in the paper.",
    )
    attend_previous_segment: bool = fixed(
        default=False,
        description="Let each segment also attend to the segment before it and to the first four "
        "tokens of its document (attention sinks). The memory that it reads then holds the "
        "segments before those (attention: infini or local). Adds no weights, so that it can also "
        "be set for weights of train.init_from that were trained without it. Not in the paper.",
    )
    memory_write_jitter: Annotated[float, Field(ge=1)] = fixed(
        default=1.0,
        description="In training, what each segment writes to the memory is scaled by a random "
        "factor between 1 and a maximum. The maximum grows to this value until 70 % of the steps; "
        "if the weights of train.init_from have a memory, it has this value from the first step. A "
        "fact is then found among more text than the training sequences have: about 1/60 as many "
        "segments as this number. 1: no scaling. Not in the paper.",
    )

    @property
    def unread_tokens(self) -> int:
        """Tokens of a text up to the first that reads Infini-attention's memory."""
        return self.segment_length * (2 if self.attend_previous_segment else 1)

    def architecture(self, vocab_size: int, sequence_length: int) -> dict[str, Any]:
        """The fields of `model.config.LlamaConfig`: this section, and what the data decide."""
        fields = self.model_dump(mode="json")
        fields["num_key_value_heads"] = (
            self.num_key_value_heads or self.num_attention_heads
        )
        if self.rope_scaling:
            fields["rope_scaling"] = self.rope_scaling.model_dump(
                mode="json", exclude_none=True
            )
        return fields | {
            "vocab_size": vocab_size,
            "max_position_embeddings": sequence_length,
        }

    @model_validator(mode="after")
    def _layers_and_heads_agree(self) -> ModelConfig:
        key_value_heads = self.num_key_value_heads or self.num_attention_heads
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must divide "
                f"hidden_size={self.hidden_size}; change one of them"
            )
        if self.head_dim is None and (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} over "
                f"num_attention_heads={self.num_attention_heads} gives an odd head size; rotary "
                "positions need an even one"
            )
        if (
            self.rope_scaling
            and self.rope_scaling.rope_type == "yarn"
            and self.rope_theta <= 1
        ):
            raise ValueError(
                f"rope_theta={self.rope_theta} must be more than 1 with rope_type=yarn"
            )
        layers = self.memory_layers
        for key, value in (
            ("memory_layers", layers),
            ("memory_maps", self.memory_maps or None),
        ):
            if value is not None and self.attention != "infini":
                raise ValueError(
                    f"{key}={str(value).lower()} is for attention=infini, not {self.attention}; "
                    "set attention=infini, or remove it"
                )
        if self.attend_previous_segment and self.attention == "softmax":
            raise ValueError(
                "attend_previous_segment=true is for attention=infini or local, and softmax has no "
                "segments; change one of them"
            )
        if layers is not None and (
            layers != sorted(set(layers)) or layers[-1] >= self.num_hidden_layers
        ):
            raise ValueError(
                f"memory_layers={layers} must be ascending numbers of layers, below "
                f"num_hidden_layers={self.num_hidden_layers}"
            )
        if self.num_attention_heads % key_value_heads:
            raise ValueError(
                f"num_key_value_heads={key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}; change one of them"
            )
        return self
