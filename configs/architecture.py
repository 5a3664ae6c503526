"""A model's architecture in full: what its section says, and what the data decide."""

from typing import Any


def of_vocabulary(config: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """A PipelineConfig as a dict, with the size that its tokenizer turned out to have."""
    data = config["data"]
    return config | {"data": data | {"tokenizer": data["tokenizer"] | {"vocab_size": vocab_size}}}


def architecture(model: dict[str, Any], vocab_size: int, sequence_length: int) -> dict[str, Any]:
    """The fields of `model.config.LlamaConfig`, from a ModelConfig as a dict."""
    fields = model | {"num_key_value_heads": model["num_key_value_heads"] or model["num_attention_heads"]}
    if scaling := fields.get("rope_scaling"):
        fields["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}
    return fields | {"vocab_size": vocab_size, "max_position_embeddings": sequence_length}
