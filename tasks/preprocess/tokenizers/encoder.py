"""A tokenizer as the encoder of documents, in whose text no special token is found."""

from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer, models

from infini_llama.tasks.preprocess.tokenizers.tokenizer import EOS, description_of

HIDDEN = "\U0010ffff"  # a noncharacter


def encoder_of(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer for documents: no text, whatever it contains, yields the id of a special token."""
    if isinstance(tokenizer.model, models.BPE) and _adds_special_tokens_alone(tokenizer):
        return _without_added_tokens(tokenizer)
    description = orjson.loads(description_of(tokenizer))
    added = {token["content"]: token for token in description["added_tokens"]}
    special = {content for content, token in added.items() if token["special"]}
    hidden = _hide_special_pieces(description["model"], special)
    has_text = len(special) < len(added)  # added tokens that are text stay, with their ids
    kept = [token for content, token in added.items() if has_text and content not in hidden]
    encoder = Tokenizer.from_str(orjson.dumps(description | {"added_tokens": kept}).decode())
    encoder.encode_special_tokens = has_text
    return encoder


def _adds_special_tokens_alone(tokenizer: Tokenizer) -> bool:
    return all(token.special for token in tokenizer.get_added_tokens_decoder().values())


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same model, which is not copied, without tokens that are looked for in the text before it is cut into words."""
    encoder = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (found := getattr(tokenizer, part)) is not None:
            setattr(encoder, part, found)
    return encoder


def _hide_special_pieces(model: dict[str, Any], special: set[str]) -> set[str]:
    """Renames special tokens in a model's own vocabulary, where it would find them in text, to what no text has; ids stay.

    Returns:
        The tokens that were renamed.
    """
    kind, vocabulary, hidden = model["type"], model["vocab"], set[str]()
    if kind == "Unigram":
        hidden = special & {piece for piece, _ in vocabulary}
        model |= {"vocab": [[HIDDEN + piece if piece in hidden else piece, score] for piece, score in vocabulary]}
    elif kind in ("WordPiece", "WordLevel"):
        hidden = special & vocabulary.keys() - {model["unk_token"]}
        model |= {"vocab": {HIDDEN + piece if piece in hidden else piece: id for piece, id in vocabulary.items()}}
    return hidden


def special_ids(tokenizer: Tokenizer) -> np.ndarray:
    """bool [vocab]: the ids that stand for no text, but for that of unknown text."""
    table = np.zeros(tokenizer.get_vocab_size(), dtype=bool)
    unknown = getattr(tokenizer.model, "unk_token", None)
    if isinstance(tokenizer.model, models.Unigram):  # says it in its description alone, which takes long to write
        number = orjson.loads(tokenizer.to_str())["model"].get("unk_id")
        unknown = tokenizer.id_to_token(number) if number is not None else None
    for number, token in tokenizer.get_added_tokens_decoder().items():
        table[number] = token.special and (token.content != unknown or token.content == EOS)
    return table


def first_special(special: np.ndarray, ids: np.ndarray) -> int | None:
    """Place of the first of `ids` that is `special`, as `special_ids` gives them; None where none is."""
    plain = np.flatnonzero(~special)
    if len(ids) == 0 or len(plain) == 0:
        return 0 if len(ids) else None
    are_at_the_ends = not special[plain[0] : plain[-1]].any()
    if are_at_the_ends and ids.min() >= plain[0] and ids.max() <= plain[-1]:
        return None
    found = special.take(ids)
    return int(found.argmax()) if found.any() else None
