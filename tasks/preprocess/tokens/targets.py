"""Targets of the loss: spans of a document's bytes, and the tokens that they become.

A rule gives the spans of a text (`AnswerTargets`). `encode_spans` is the only place that turns
spans into tokens; what follows it has a bit per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError, tokenizer_faults
from infini_llama.configs.schema.sources import TextConfig
from infini_llama.tasks.preprocess.sources.source import TextInput
from infini_llama.tasks.tokenizers.encoder import Encode, encode_each

# First byte of a text that counts, and the one behind the last. The spans of a text ascend, and
# there is text between any two. A span that reaches the end of its text takes in the token that
# ends the document.
ByteSpan = tuple[int, int]


@dataclass(frozen=True)
class AnswerTargets:
    """The answer of a document counts: what follows the last `answer_after` in it, and its end."""

    answer_after: str

    def spans(self, text: bytes, file: TextInput) -> tuple[ByteSpan, ...]:
        """The spans of a text that count.

        Args:
            file: that the text is from.

        Raises:
            DataError: the text has no answer.
        """
        mark = self.answer_after.encode()
        place = text.rfind(mark)
        if place < 0:
            section = file.key.rpartition(".")[0]
            raise DataError(
                f"{file} has a document without {section}.answer_after={self.answer_after!r} "
                f"({text.decode()[:60]!r} …), so it has no answer; leave it out, correct the key, "
                f"or set {section}.loss_on=all. A text of more than 16 MiB is several documents."
            )
        return ((place + len(mark), len(text)),)


def targets_of(section: TextConfig) -> AnswerTargets | None:
    """The rule of a section that names text; None: all tokens count."""
    return AnswerTargets(section.answer_after) if section.loss_on == "answer" else None


@dataclass(frozen=True)
class EncodedSpans:
    """Documents that were encoded, joined.

    Attributes:
        ids: of the documents, without their ends.
        offsets: where in the IDs each begins, and their end, int64 [documents + 1].
        targets: which tokens count, those of the documents and behind each its end,
            bool [tokens + documents].
    """

    ids: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray


def encode_spans(
    encode: Encode,
    texts: list[bytes],
    spans: Sequence[Sequence[ByteSpan]],
    encoder: Tokenizer | None = None,
) -> EncodedSpans:
    """Encode documents, and mark the tokens of the spans.

    Each text is encoded as a whole, and its tokens are cut at the bounds. If a bound falls inside a
    token, the pieces of that document are encoded separately, so that no token reaches across it.

    Pieces by themselves may stand for another text: Llama 2's tokenizer puts a space before what it
    encodes. Such a document keeps the tokens of its whole text. A token across a bound belongs to
    what begins at that bound.

    Args:
        spans: of each text.
        encoder: gives the IDs of `encode`; None: the tokens of pieces stand for the same text.

    Raises:
        TokenizerFails: the encoder cannot decode something.
    """
    cuts = [
        _cuts(len(text), of_text) for text, of_text in zip(texts, spans, strict=True)
    ]
    documents = list[np.ndarray]()
    targets = list[np.ndarray]()
    encoded = _encode_pieces(encode, texts, cuts, encoder)
    for text, of_text, places, pieces in zip(texts, spans, cuts, encoded, strict=True):
        starts = (0, *places)
        for start, piece in zip(starts, pieces, strict=True):
            counts = any(begin <= start < end for begin, end in of_text)
            documents.append(piece)
            targets.append(np.full(len(piece), counts))
        targets.append(np.array([any(end == len(text) for _, end in of_text)]))
    lengths = [sum(map(len, pieces)) for pieces in encoded]
    return EncodedSpans(
        np.concatenate(documents),
        np.cumsum([0, *lengths]),
        np.concatenate(targets),
    )


def _cuts(size: int, spans: Sequence[ByteSpan]) -> list[int]:
    """The bounds of spans within a text of `size` bytes, ascending."""
    bounds = {bound for span in spans for bound in span}
    return sorted(bounds - {0, size})


def _encode_pieces(
    encode: Encode,
    texts: list[bytes],
    cuts: Sequence[Sequence[int]],
    encoder: Tokenizer | None,
) -> list[list[np.ndarray]]:
    """The tokens of each text in pieces, which end at its cuts and at its end."""
    wholes = encode_each(encode, texts)
    beginnings = [
        text[:cut] for text, places in zip(texts, cuts, strict=True) for cut in places
    ]
    encoded_beginnings = iter(encode_each(encode, beginnings))
    pieces = list[list[np.ndarray]]()
    for text, ids, places in zip(texts, wholes, cuts, strict=True):
        ends = [0]
        is_whole = True
        for _ in places:
            beginning = next(encoded_beginnings)
            ascends = len(beginning) >= ends[-1]
            is_beginning = np.array_equal(ids[: len(beginning)], beginning)
            is_whole = is_whole and ascends and is_beginning
            ends.append(len(beginning))
        ends.append(len(ids))
        if is_whole:
            pieces.append([ids[first:last] for first, last in pairwise(ends)])
            continue
        bounds = pairwise((0, *places, len(text)))
        separate = encode_each(encode, [text[first:last] for first, last in bounds])
        if encoder and not _stand_for_same_text(encoder, ids, np.concatenate(separate)):
            pieces.append(_cut_by_offsets(encoder, text, places))
        else:
            pieces.append(separate)
    return pieces


def _stand_for_same_text(
    encoder: Tokenizer, ids: np.ndarray, others: np.ndarray
) -> bool:
    with tokenizer_faults():
        text = encoder.decode(ids.tolist(), skip_special_tokens=False)
        return encoder.decode(others.tolist(), skip_special_tokens=False) == text


def _cut_by_offsets(
    encoder: Tokenizer, text: bytes, places: Sequence[int]
) -> list[np.ndarray]:
    """The tokens of a text in pieces, the first token beyond each place with the later piece."""
    with tokenizer_faults():
        encoding = encoder.encode(text.decode(), add_special_tokens=False)
    # In characters. A token may stand for nothing, and then does not end later than those before.
    ends = np.maximum.accumulate([end for _, end in encoding.offsets])
    characters = [len(text[:place].decode()) for place in places]
    return np.split(
        np.array(encoding.ids, dtype=np.uint32),
        np.searchsorted(ends, characters, side="right"),
    )
