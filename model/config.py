"""The architecture of a model, in the field names of Hugging Face's LlamaConfig."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class LlamaConfig:
    """What decides the parameters and the function of a Llama or Infini-Llama.

    `max_position_embeddings` is the length it is trained at, kept for Hugging Face's readers: nothing here depends on it.

    Raises:
        ValueError: heads do not divide the width or each other, or a field has a value outside its choices.
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
    attention: Literal["softmax", "infini"] = "softmax"
    segment_length: int = 64

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads or self.head_dim % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} over num_attention_heads={self.num_attention_heads} is no whole, even head size"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide num_attention_heads={self.num_attention_heads}"
            )
        if self.attention not in ("softmax", "infini"):
            raise ValueError(f"attention={self.attention!r} is neither 'softmax' nor 'infini'")
        if self.segment_length < 1:
            raise ValueError(f"segment_length={self.segment_length} is below 1")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LlamaConfig":
        """From a plain dict; unknown keys raise TypeError."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
