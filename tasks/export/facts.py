"""What is known of exported weights."""

from infini_llama.tasks.records.record import Record

IN_METADATA = {"run", "step", "tokens", "dataset", "dataset_digest", "weights_sha256", "infini_llama"}


class ModelFacts(Record):
    """Origin and training of exported weights, for the model card and the files' metadata.

    Attributes:
        tokens: seen in training; validation_loss: nats per token at this step, None if it was not measured there.
        sequence_length, vocabulary: in tokens.
        infini_llama: version that exported them.
    """

    run: str
    step: int
    tokens: int
    parameters: int
    validation_loss: float | None
    bits_per_byte: float | None
    dataset: str
    dataset_digest: str
    sequence_length: int
    vocabulary: int
    weights_sha256: str
    infini_llama: str
    sample_prompt: str
    global_batch_size: int | None
    learning_rate: float | None
    seed: int | None

    def metadata(self) -> dict[str, str]:
        """Of each safetensors file."""
        return {f"infini_llama.{name}": str(value) for name, value in self.model_dump(include=IN_METADATA).items()}


class Exported(Record):
    """A folder that `export` wrote. custom_code: features that Hugging Face's Llama does not have; empty: no code is needed."""

    path: str
    run: str
    step: int
    parameters: int
    dtype: str
    files: tuple[str, ...]
    custom_code: tuple[str, ...]
