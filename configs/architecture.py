"""A model's architecture in full: what its section says, and what the data decide."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infini_llama.configs.schema import PipelineConfig


def with_vocab_size(config: "PipelineConfig", vocab_size: int) -> "PipelineConfig":
    """The configuration with the vocabulary size that its tokenizer turned out to have, which may be below the schema's minimum."""
    tokenizer = config.data.tokenizer.model_copy(update={"vocab_size": vocab_size})
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": tokenizer})})


def architecture(model: dict[str, Any], vocab_size: int, sequence_length: int) -> dict[str, Any]:
    """The fields of `model.config.LlamaConfig`, from a ModelConfig as a dict."""
    fields = model | {"num_key_value_heads": model["num_key_value_heads"] or model["num_attention_heads"]}
    if scaling := fields.get("rope_scaling"):
        fields["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}
    return fields | {"vocab_size": vocab_size, "max_position_embeddings": sequence_length}
