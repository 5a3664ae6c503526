"""The architecture."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.section import Section


class ModelConfig(Section):
    """The architecture, in the field names of Hugging Face's LlamaConfig."""

    hidden_size: Annotated[int, Field(ge=1)] = Field(
        default=256, title="Hidden size", description="Width of the residual stream."
    )
    intermediate_size: Annotated[int, Field(ge=1)] = Field(
        default=768, title="Intermediate size", description="Inner width of the SwiGLU feed-forward block."
    )
    num_hidden_layers: Annotated[int, Field(ge=1)] = Field(
        default=4, title="Layers", description="Number of decoder blocks."
    )
    num_attention_heads: Annotated[int, Field(ge=1)] = Field(
        default=4, title="Attention heads", description="Query heads; must divide hidden_size."
    )
    num_key_value_heads: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Key-value heads",
        description="Heads of keys and values (GQA); must divide the attention heads. Default: as many.",
    )
    rope_theta: Annotated[float, Field(gt=0)] = Field(
        default=10_000.0, title="RoPE theta", description="Base of the rotary frequencies."
    )
    rms_norm_eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-5, title="RMSNorm epsilon", description="Added to the mean square."
    )
    initializer_range: Annotated[float, Field(gt=0)] = Field(
        default=0.02, title="Initializer range", description="Standard deviation of the initial weights."
    )
    tie_word_embeddings: bool = Field(
        default=True, title="Tie embeddings", description="Use the input embedding as the output head's weight."
    )
    attention: Literal["softmax", "infini"] = Field(
        default="softmax",
        title="Attention",
        description="'softmax': causal attention over the row; 'infini': attention inside segments plus a compressive memory "
        "(Munkhdalai et al. 2024, arXiv 2404.07143).",
    )
    segment_length: Annotated[int, Field(ge=1)] = Field(
        default=64, title="Segment length", description="Tokens of local attention in one segment (attention: infini)."
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        key_value_heads = self.num_key_value_heads or self.num_attention_heads
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must divide hidden_size={self.hidden_size}; change one of them"
            )
        if (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} over num_attention_heads={self.num_attention_heads} gives an odd head size; "
                "rotary positions need an even one"
            )
        if self.num_attention_heads % key_value_heads:
            raise ValueError(
                f"num_key_value_heads={key_value_heads} must divide num_attention_heads={self.num_attention_heads}; change one of them"
            )
        return self
