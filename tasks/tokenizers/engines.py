"""The engine that encodes: `tokenizers`, or gigatoken, which is faster.

gigatoken is used only where it gives the same IDs. It is compared with `tokenizers` on the same
texts once per tokenizer, and on one document in SAMPLED of every build.
"""

import importlib
import logging
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from infini_llama.configs.errors import is_panic, one_line, tokenizer_faults
from infini_llama.tasks.records.manifest import EngineChoice
from infini_llama.tasks.storage.artifacts import key_of
from infini_llama.tasks.storage.files import write_atomic
from infini_llama.tasks.tokenizers.differing_characters import COMPOSED, CUT, has_any
from infini_llama.tasks.tokenizers.encoder import (
    Encode,
    Ids,
    encode_each,
    encoder_of,
    reference,
)
from infini_llama.tasks.tokenizers.tokenizer import description_of

log = logging.getLogger("infini_llama.preprocess")
REFERENCE = "tokenizers"
FAST = "gigatoken"
# Bytes of the files as they are stored, as far as they are known (0: none is, which counts as
# large). Less is encoded before the fast engine is imported and checked.
WORTH_A_FAST_ENGINE = 4_000_000
SAMPLED = 1000  # one document of so many is encoded by the reference too
# Bytes of UTF-8; of a longer one its beginning: the reference takes 40 times as long, and a hundred
# bytes of memory per token.
LONGEST_SAMPLED = 2**15
COMPARED = 1024  # texts at once
FUZZ_STRINGS = 3000
ALPHABETS = (
    "abcXYZ 0123456789",
    " \t\n\r\v\f\u00a0\u2003\u3000\u200b",
    "'s't'LL've'\u2019d.,;:!?-_()[]{}<>|/\\\"",
    "äßÉñøŁžΩπσςДжяאبي",
    "日本語漢字ひらカナ한국어ไทยहिन्दी",
    "🙂👩\u200d👩\u200d👧🇩🇪\u2764\ufe0f",
    "e\u0301o\u0308\u0323\u0327\u0915\u094d\u0937",
    "\x00\x01\x7f\u0085\u2028\ufeff\ufffd\U0010ffff½²٣Ⅷ",
)

# The last one, by its encoder: the build need not open it.
_compared_engine: dict[Tokenizer, Encode] = {}


class EngineDiffers(Exception):
    """The fast engine gave other IDs than the reference during a build, which are not used."""


def choose_engine(
    tokenizer: Tokenizer,
    split_special_tokens: bool,
    notes: Path,
) -> EngineChoice:
    """The fast engine where it is installed and gives the reference's IDs on the `golden` texts.

    Otherwise the reference.

    Args:
        split_special_tokens: see `encoder_of`.
        notes: folder with a file per tokenizer and versions that were compared.
    """
    try:
        number = version(FAST)
        _gigatoken()
    except PackageNotFoundError:
        log.info(
            "%s is not installed: %s encodes the text, which takes longer",
            FAST,
            REFERENCE,
        )
        return reference_engine()
    except Exception as error:
        # An installation can be broken in any way; it is not remembered, since it may be repaired.
        fault = f"it cannot be imported ({one_line(error)})"
    else:
        fault = _compared(tokenizer, split_special_tokens, notes)
        if fault is None:
            return EngineChoice(name=FAST, version=number, refused={})
    log.warning("%s %s is not used for this tokenizer: %s", FAST, version(FAST), fault)
    return reference_engine({FAST: fault})


def reference_engine(refused: dict[str, str] | None = None) -> EngineChoice:
    """`tokenizers` itself; `refused`: why another does not encode, by its name."""
    return EngineChoice(
        name=REFERENCE, version=version(REFERENCE), refused=refused or {}
    )


def remember_comparison(
    tokenizer: Tokenizer,
    split_special_tokens: bool,
    notes: Path,
    fault: str | None,
) -> None:
    """Record the outcome of a comparison.

    Args:
        split_special_tokens: see `encoder_of`.
        fault: why the fast engine is not to be used for this tokenizer; None: it may be.
    """
    notes.mkdir(parents=True, exist_ok=True)
    agreement, refusal = _notes_of(tokenizer, split_special_tokens, notes)
    write_atomic(agreement if fault is None else refusal, fault or "")


def _compared(
    tokenizer: Tokenizer, split_special_tokens: bool, notes: Path
) -> str | None:
    agreement, refusal = _notes_of(tokenizer, split_special_tokens, notes)
    if os.path.lexists(refusal):
        try:
            return refusal.read_text(encoding="utf-8", errors="replace")
        except OSError as error:  # it refuses all the same
            return f"{refusal} cannot be read ({error.strerror})"
    if agreement.exists():
        return None
    fault = compare(tokenizer, split_special_tokens, golden(tokenizer))
    remember_comparison(tokenizer, split_special_tokens, notes, fault)
    return fault


def _notes_of(
    tokenizer: Tokenizer,
    split_special_tokens: bool,
    notes: Path,
) -> tuple[Path, Path]:
    """The note that the fast engine agreed with this version of the reference, and its refusal.

    The refusal names no version of the reference, since the engine's units (`recipe_for`) do not
    either: wrong ones may be in the store. Both may be there, if another preparation has refused
    the engine meanwhile.
    """
    number = version(FAST)
    key = key_of([FAST, number, description_of(tokenizer), split_special_tokens])
    name = f"{FAST}-{number}-{key[:16]}"
    return (
        notes / f"{name}-{REFERENCE}-{version(REFERENCE)}.agrees",
        notes / f"{name}.refused",
    )


def compare(
    tokenizer: Tokenizer,
    split_special_tokens: bool,
    texts: list[bytes],
) -> str | None:
    """The fault of the fast engine on these texts; None where every ID is the reference's."""
    encoder = encoder_of(tokenizer, split_special_tokens)
    try:
        slow = reference(encoder)
        fast = fast_encoder(encoder)
        for start in range(0, len(texts), COMPARED):
            batch = texts[start : start + COMPARED]
            of_fast = encode_each(fast, batch)
            of_slow = encode_each(slow, batch)
            for text, ids, right in zip(batch, of_fast, of_slow, strict=True):
                if not np.array_equal(ids, right):
                    shown = text.decode()[:40]
                    return f"it gives other ids than {REFERENCE} for a text that begins {shown!r}"
        _compared_engine.clear()
        _compared_engine[encoder] = fast
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            return f"it does not take the tokenizer ({one_line(error)})"
        raise
    return None


def golden(tokenizer: Tokenizer) -> list[bytes]:
    """The same texts every time.

    They have what words are cut at, special tokens written out, and strings of all of Unicode.
    """
    choose = random.Random(2404)
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    texts = [
        "",
        " ",
        "\n\n",
        "a" * 5000,
        " " * 3000,
        "don't we'LL I'd",
        "3.14159 1,000,000 0x1F",
        *special,
    ]
    for token in ("<|endoftext|>", "</s>", "[UNK]", *special[:50]):
        texts.append(f"a{token}b {token}")
    for number in range(FUZZ_STRINGS):
        alphabet = "".join(choose.sample(ALPHABETS, k=choose.randint(1, 3)))
        letters = choose.choices(alphabet, k=choose.randint(1, 60))
        if number % 4 == 0:
            for _ in range(8):
                below_surrogates = choose.randrange(0xD800)
                above_surrogates = choose.randrange(0xE000, 0x110000)
                letters.append(chr(choose.choice((below_surrogates, above_surrogates))))
            choose.shuffle(letters)
        texts.append("".join(letters))
    return [text.encode() for text in texts]


def open_engine(name: str, tokenizer: Tokenizer, split_special_tokens: bool) -> Encode:
    """The engine of that name over this tokenizer's documents.

    Args:
        split_special_tokens: see `encoder_of`.

    Raises:
        EngineDiffers: while encoding, a sampled document has other IDs than the reference's.
        TokenizerFails: now or while encoding.
    """
    encoder = encoder_of(tokenizer, split_special_tokens)
    with tokenizer_faults():
        encode = reference(encoder) if name == REFERENCE else _sampling(encoder)
    return tokenizer_faults()(encode)


def _sampling(encoder: Tokenizer) -> Encode:
    slow = reference(encoder)
    fast = _compared_engine.pop(encoder, None) or fast_encoder(encoder)
    encoded = 0

    def encode(texts: list[bytes]) -> Ids:
        nonlocal encoded
        ids, offsets = fast(texts)
        for number in range(-encoded % SAMPLED, len(texts), SAMPLED):
            text = texts[number]
            sample = ids[offsets[number] : offsets[number + 1]]
            if len(text) > LONGEST_SAMPLED:
                # The decoder leaves out a part of a character.
                text = text[:LONGEST_SAMPLED].decode(errors="ignore").encode()
                sample = fast([text])[0]
            if not np.array_equal(sample, slow([text])[0]):
                shown = text.decode()[:40]
                raise EngineDiffers(
                    f"{FAST} gives other ids than {REFERENCE} for a text that begins {shown!r}"
                )
        encoded += len(texts)
        return ids, offsets

    return encode


def fast_encoder(encoder: Tokenizer) -> Encode:
    """gigatoken, but for texts with a character that it treats otherwise than the reference.

    The reference encodes those; see `differing_characters`.
    """
    fast = gigatoken_of(encoder.to_str())
    slow = reference(encoder)
    differing = CUT if encoder.normalizer is None else CUT + COMPOSED

    def encode(texts: list[bytes]) -> Ids:
        ids, offsets = fast(texts)
        if not has_any(
            b"".join([text for text in texts if not text.isascii()]), differing
        ):
            return ids, offsets
        parts = np.split(ids, offsets[1:-1])
        for number, text in enumerate(texts):
            if has_any(text, differing):
                parts[number] = slow([text])[0]
        return np.concatenate(parts), np.cumsum([0, *map(len, parts)])

    return encode


def gigatoken_of(description: str) -> Encode:
    """gigatoken with the tokenizer of a tokenizer.json."""
    engine = _gigatoken().Tokenizer.from_json(description)
    # It imports more at its first use.
    _in_another_thread(lambda: engine.encode_batch([b"a"]))

    def encode(texts: list[bytes]) -> Ids:
        layout = engine.encode_batch(texts).layout
        return layout.content.data, layout.offsets.data

    return encode


def _gigatoken() -> Any:
    return _in_another_thread(lambda: importlib.import_module(FAST))


def _in_another_thread(action: Callable[[], Any]) -> Any:
    """Run `action` in another thread.

    A request to stop is raised in the main thread, and gigatoken would report it as its own fault.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(action).result()
