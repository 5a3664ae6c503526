"""What a pretrained Llama is trained on to use a memory, and then to read on as well as before.

The recipe's measurements are in docs/infini-attention-results.md.
"""

from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer

from infini_llama.configs.reading import JsonObject
from infini_llama.configs.schema import ModelConfig
from infini_llama.configs.schema.tokenizer import TokenizerConfig
from infini_llama.tasks.preprocess.sources.passkey import (
    FILLER,
    FORMS,
    QUESTION,
    Hidden,
)
from infini_llama.tasks.tokenizers.encoder import TextEncoder

ROW_SEGMENTS = 12  # of the longest text from which the memory learns to hold a number
JITTER = 4_194_304.0  # far more than the segments of a million tokens, see docs/infini-attention.md
LEARNING_STEPS = 1000
TEXT_SEGMENTS = 4  # of a sequence
TEXT_TOKENS = 4096  # of a step, at least
TEXT_STEPS = 240
DRAWN = 100  # texts, of which the longest is to fit
# The end of each question, by form; the answer follows it.
ANSWER_AFTER = {"passkey": QUESTION, "sentences": "? It is"}


@dataclass(frozen=True)
class Numbers:
    """A source of texts with a hidden number, whose answer alone is learned.

    Attributes:
        form: data.passkey.form.
        segments: most segments that a text has.
        in_text: the number is hidden in natural text, else in filler.
        weight: sequences per step.
    """

    name: str
    form: str
    segments: int
    in_text: bool
    weight: float


# From near numbers the memory is learned at all, from far ones to hold a number.
NUMBERS = (
    Numbers("near", "sentences", 3, True, 1.2),
    Numbers("middle", "sentences", 6, True, 1.2),
    Numbers("far", "sentences", ROW_SEGMENTS, True, 1.0),
    Numbers("near-repeated", "passkey", 3, False, 1.0),
    Numbers("far-repeated", "sentences", ROW_SEGMENTS, False, 0.6),
)
SEQUENCES = 6  # per step, with one of ordinary text
# A step has some 30 answers of six tokens and a sequence of text: with this, both have about half
# of the loss.
ANSWER_WEIGHT = 6


def to_learn_a_memory(
    mapping: dict[str, JsonObject],
    tokenizer: Tokenizer,
) -> dict[str, JsonObject]:
    """The configuration with what teaches a memory, as in configs/infini_from_smollm2.yaml.

    That is numbers hidden in texts, and ordinary text beside them, without which the language is
    lost.
    """
    segment = ModelConfig.model_validate(mapping["model"]).segment_length
    sources = [source_of(numbers, mapping, tokenizer) for numbers in NUMBERS]
    english: JsonObject = {
        "name": "english",
        "files": mapping["data"]["files"],
        "weight": 1,
    }
    data: JsonObject = {
        "sources": [*sources, english],
        "sequence_length": ROW_SEGMENTS * segment,
        "packing": "best_fit",
        "tokenizer": mapping["data"]["tokenizer"],
    }
    train: JsonObject = {
        "max_steps": LEARNING_STEPS,
        "global_batch_size": SEQUENCES,
        "micro_batch_size": SEQUENCES,
        "document_masking": True,
        "learning_rate": 4e-4,
        "weight_decay": 0,
        "gate_learning_rate": 0.01,
        "map_learning_rate": 1e-3,
        "lr_schedule": "wsd",
        "warmup_steps": 20,
        "eval_steps": 250,
        "eval_tokens": 4000,
        "save_steps": 100,
    }
    model = mapping["model"] | {"memory_write_jitter": JITTER}
    return {"data": data, "model": model, "train": mapping["train"] | train}


def source_of(
    numbers: Numbers,
    mapping: dict[str, JsonObject],
    tokenizer: Tokenizer,
) -> JsonObject:
    """The entry of data.sources, with as much filler as the segments hold."""
    segment = ModelConfig.model_validate(mapping["model"]).segment_length
    settings = TokenizerConfig.model_validate(mapping["data"]["tokenizer"])
    encoder = TextEncoder(tokenizer, settings.split_special_tokens)
    filler = len(encoder.encode(FILLER))
    least = max(
        len(encoder.encode(around_filler(FORMS[numbers.form](Random(seed)))))
        for seed in range(DRAWN)
    )
    most = max(1, (numbers.segments * segment - least) // filler)
    passkey: JsonObject = {"form": numbers.form, "documents": 6000, "repetitions": most}
    text: JsonObject = {}
    if numbers.in_text:  # its words have more tokens
        passkey |= {"repetitions": max(1, 2 * most // 3), "filler": "files"}
        text = {"files": mapping["data"]["files"]}
    task: JsonObject = {
        "passkey": passkey,
        "loss_on": "answer",
        "answer_after": ANSWER_AFTER[numbers.form],
        "loss_weight": ANSWER_WEIGHT,
        "weight": numbers.weight,
    }
    return {"name": numbers.name, "source": "passkey"} | text | task


def around_filler(hidden: Hidden) -> str:
    """A text to be trained on without its filler."""
    statements = "".join(hidden.others) + hidden.statement
    return f"{hidden.head}{statements}{hidden.question} {hidden.answer}."


def to_read_text(mapping: dict[str, JsonObject]) -> dict[str, JsonObject]:
    """The configuration of the last steps of a model whose memory was learned in short segments.

    It trains on text, in segments that see the one before. The memory is not learned in such
    segments: over the rows that are trained on, they carry facts without it.
    """
    model = ModelConfig.model_validate(mapping["model"])
    length = TEXT_SEGMENTS * model.segment_length
    sequences = max(1, TEXT_TOKENS // length)
    data = mapping["data"] | {"sequence_length": length}
    first = min(model.memory_layers or [0])
    train: JsonObject = {
        "frozen_layers": first,
        "max_steps": TEXT_STEPS,
        "global_batch_size": sequences,
        "micro_batch_size": sequences,
        "document_masking": True,
        "learning_rate": 4e-4,
        "warmup_steps": 5,
        "save_steps": TEXT_STEPS,
    }
    jitter = mapping["model"] | {"memory_write_jitter": JITTER}
    return {"data": data, "model": jitter, "train": mapping["train"] | train}
