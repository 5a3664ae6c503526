"""The model card: README.md of an exported folder, with facts about the weights."""

import json
from collections.abc import Iterable

from infini_llama.model.config import LlamaConfig
from infini_llama.model.hf import SEGMENTS
from infini_llama.tasks.records.record import Record

IN_METADATA = {
    "run",
    "step",
    "tokens",
    "dataset",
    "dataset_digest",
    "weights_sha256",
    "infini_llama",
}


class ModelFacts(Record):
    """Origin and training of exported weights, for the model card and the files' metadata.

    Attributes:
        tokens: seen in training.
        validation_loss: nats per token at this step, None if it was not measured there.
        sequence_length, vocabulary: in tokens.
        split_special_tokens: data.tokenizer.split_special_tokens of the run.
        pad_token: that the tokenizer has, of the model that the run began from.
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
    split_special_tokens: bool
    pad_token: str | None
    global_batch_size: int
    learning_rate: float
    seed: int

    def metadata(self) -> dict[str, str]:
        """Metadata of each safetensors file."""
        return {
            f"infini_llama.{name}": str(value)
            for name, value in self.model_dump(include=IN_METADATA).items()
        }


class Exported(Record):
    """A folder that `export` wrote.

    Attributes:
        custom_code: features that Hugging Face's Llama does not have; empty: no code is needed.
    """

    path: str
    run: str
    step: int
    parameters: int
    dtype: str
    files: tuple[str, ...]
    custom_code: tuple[str, ...]


MEMORY = {"memory_write_jitter"}
USE = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER"{arguments})
model = AutoModelForCausalLM.from_pretrained("FOLDER"{arguments})
inputs = tokenizer({prompt}, return_tensors="pt", add_special_tokens=False{reading})
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"""


def model_card(
    facts: ModelFacts, config: LlamaConfig, dtype: str, beyond: list[str]
) -> str:
    """Markdown with the front matter that Hugging Face's hub reads.

    It states facts of the run, no date and no path.
    """
    kind = "An Infini-Llama" if config.attention == "infini" else "A Llama"
    tags = [
        "llama",
        *(["infini-attention"] if config.attention == "infini" else []),
        "infini-llama",
    ]
    use = _use(facts, has_own_code=bool(beyond))
    trained = _training(facts, dtype)
    own_code = ""
    if beyond:
        own_code = (
            f"\nHugging Face's Llama does not have {', '.join(beyond)}, "
            "so the folder contains the model's code; "
            "`trust_remote_code=True` runs that code. It needs transformers 5.\n"
        )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
{_lines(f"- {tag}" for tag in tags)}
---

# {facts.run}

{kind} of {facts.parameters:,} parameters, trained and exported by \
infini-llama {facts.infini_llama}.

```python
{use}
```
{own_code}
## Training

{_table(trained)}

## Architecture

{_table(_architecture(config))}

## Padding

{_padding(facts)}
"""


def _padding(facts: ModelFacts) -> str:
    if facts.pad_token is not None:
        return (
            "To generate for several prompts, pad on the left: "
            '`tokenizer.padding_side = "left"`.'
        )
    return """The tokenizer has no padding token. To generate for several prompts, pad on the left \
with the end-of-text token, which
the attention mask hides: `tokenizer.pad_token = tokenizer.eos_token; \
tokenizer.padding_side = "left"`. To train, also pad
the labels with -100 (`DataCollatorForSeq2Seq`): a collator that hides every padding token in the \
labels would hide the
ends of texts too."""


def _use(facts: ModelFacts, has_own_code: bool) -> str:
    """A program that continues the first line of the sample's prompt."""
    first_line = next(iter(facts.sample_prompt.strip().splitlines()), "Once")
    # Without it, transformers finds special tokens in a prompt.
    reading = ", split_special_tokens=True" if facts.split_special_tokens else ""
    return USE.format(
        arguments=", trust_remote_code=True" if has_own_code else "",
        prompt=json.dumps(first_line, ensure_ascii=False),  # also a literal of Python
        reading=reading,
    )


def _training(facts: ModelFacts, dtype: str) -> dict[str, str | int]:
    """Facts of the training, as the card names them."""
    return {
        "steps": f"{facts.step:,}",
        "tokens seen": f"{facts.tokens:,}",
        "sequence length": f"{facts.sequence_length:,}",
        "sequences per step": f"{facts.global_batch_size:,}",
        "peak learning rate": f"{facts.learning_rate:g}",
        "seed": facts.seed,
        "validation loss": _number(facts.validation_loss, "nats per token"),
        "bits per byte": _number(facts.bits_per_byte, ""),
        "dataset": f"`{facts.dataset}`, digest `{facts.dataset_digest}`",
        "vocabulary": f"{facts.vocabulary:,} tokens",
        "sha256 of the run's weights": f"`{facts.weights_sha256}`",
        "stored as": dtype,
    }


def _architecture(config: LlamaConfig) -> dict[str, str | int]:
    """The fields that have a meaning for this attention."""
    left_out = SEGMENTS | MEMORY if config.attention == "softmax" else set[str]()
    return {
        name: f"`{value}`"
        for name, value in config.to_dict().items()
        if name not in left_out
    }


def _number(value: float | None, unit: str) -> str:
    return (
        "not measured at this step" if value is None else f"{value:.4f} {unit}".strip()
    )


def _table(values: dict[str, str | int]) -> str:
    return "| | |\n|---|---|\n" + _lines(
        f"| {name} | {value} |" for name, value in values.items()
    )


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)
