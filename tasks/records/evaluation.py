"""Measurements of a trained model by `evaluate`."""

from typing import Generic, TypeVar

from pydantic import ConfigDict

from infini_llama.tasks.records.record import Record


class TextLoss(Record):
    """How well a model predicts a text.

    Attributes:
        loss: nats per token.
        loss_by_part, bits_per_byte_by_part: of each part of a sequence; None for one without
            targets.
        part: tokens of a part, of which the last may have fewer.
        length: tokens of a sequence.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    loss_by_part: tuple[float | None, ...] | None = None
    bits_per_byte_by_part: tuple[float | None, ...] | None = None
    part: int | None = None
    length: int | None = None


class MemoryControls(Record):
    """Answers with a memory that is not that of the text, as fractions of the texts.

    Attributes:
        swapped_own, swapped_other: with the memory of another text, its own number and the other
            text's; None where all are alike.
        filler_alone: its own number with the memory of filler without a number.
    """

    swapped_own: float | None = None
    swapped_other: float | None = None
    filler_alone: float


class PasskeyResult(Record):
    """Retrieval at one length and depth, or over a number of segment boundaries.

    Attributes:
        length: as requested.
        tokens: of the longest text.
        depth: of the number in the filler; None where the number of boundaries was requested.
        distance: most tokens between the number and the question.
        boundaries: most segment boundaries between the number and its prediction; the same in all
            texts where depth is None.
        found: fraction of numbers.
        right_tokens: fraction of their tokens.
        right_by_token: fraction of their tokens, by place in the number.
        controls: with the memory on; None where segments see the number without it, too.
    """

    length: int
    tokens: int
    depth: float | None = None
    distance: int
    boundaries: int | None = None
    found: float
    right_tokens: float
    right_by_token: tuple[float, ...]
    controls: MemoryControls | None = None


class Evaluated(Record):
    """The model that was measured.

    Attributes:
        device: cpu or cuda.
    """

    json_without = "none"

    run: str
    checkpoint: str
    step: int
    device: str


Measurement = TypeVar("Measurement")


class WithMemory(Record, Generic[Measurement]):
    """A measurement of a model; with Infini-attention one with and one without its memory."""

    model: Measurement | None = None
    memory: Measurement | None = None
    no_memory: Measurement | None = None

    def measurements(self) -> list[tuple[str, Measurement]]:
        """The measurements that were taken, each with the words that distinguish it."""
        named = (
            ("", self.model),
            ("with memory", self.memory),
            ("without memory", self.no_memory),
        )
        return [(words, measured) for words, measured in named if measured is not None]


class Perplexity(WithMemory[TextLoss], Evaluated):
    """Losses over a text.

    Attributes:
        text: files, or a description of the dataset's split.
        stream: each text was read as one, in constant state.
    """

    text: str | tuple[str, ...]
    stream: bool


class PasskeyRetrieval(WithMemory[tuple[PasskeyResult, ...]], Evaluated):
    """Passkey retrieval.

    Attributes:
        form, filler: of the texts, see `find_passkeys_across`.
        text: files whose text was the filler, see `find_passkeys_after`.
        trained_length: tokens per sequence.
    """

    samples: int
    seed: int
    form: str = "passkey"
    filler: str = "repeated"
    text: tuple[str, ...] | None = None
    trained_length: int


class EvaluationRequest(Record):
    """Identity of a measurement at the end of a run, so that it is taken once.

    Attributes:
        digest: of the checkpoint.
    """

    checkpoint: str
    digest: str
    sequences: int | None
    passkey_lengths: tuple[int, ...]


class Evaluations(Record):
    """Results of evaluate.after_training."""

    json_without = "none"

    perplexity: Perplexity | None = None
    passkey: PasskeyRetrieval | None = None
