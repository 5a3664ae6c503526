"""An engine that encodes faster than `tokenizers`, used only where it gives the same ids."""

import importlib
import json
import logging
import random
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any
from unicodedata import category

import numpy as np
from tokenizers import Tokenizer

from infini_llama.tasks.preprocess.sources.texts import batches
from infini_llama.tasks.preprocess.tokenizers.encoder import encoder_of
from infini_llama.tasks.preprocess.tokenizers.limits import within_limits
from infini_llama.tasks.preprocess.tokenizers.split_points import Cut, cut_of
from infini_llama.tasks.preprocess.tokenizers.tokenizer import description_of
from infini_llama.tasks.records.manifest import EngineChoice
from infini_llama.tasks.storage.artifacts import checksum_of
from infini_llama.tasks.storage.files import write_atomic

log = logging.getLogger("infini_llama.preprocess")
REFERENCE = "tokenizers"
FAST = "gigatoken"
WORTH_A_FAST_ENGINE = 4_000_000  # bytes of text: less is encoded before one is imported and checked
SAMPLED = 1000  # one document of so many is encoded by the reference too
# Characters; of a longer one its beginning: the reference takes 40 times as long, and a hundred bytes of memory per token.
LONGEST_SAMPLED = 2**15
BEYOND = 0x34000  # no letter has a number so high
ASCII = bytes(range(128))
TOGETHER = 250_000  # characters that the reference is given at once, for the same reason
COMPARED = 64  # texts at once
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

Ids = tuple[np.ndarray, np.ndarray]  # of several texts, joined, and where in them each begins: [texts + 1], from 0
Encode = Callable[[list[bytes]], Ids]  # of texts in UTF-8


class EngineDiffers(Exception):
    """During the run, a fast engine gave other ids than the reference; what it encoded is not used."""


def reference(encoder: Tokenizer) -> Encode:
    """`tokenizers` itself, over pieces of long texts where it is known where they can be cut."""
    cut = cut_of(encoder)

    def encode(texts: list[bytes]) -> Ids:
        several = [cut(text.decode()) for text in texts]
        together = batches(chain.from_iterable(several), TOGETHER)
        ids = [part for pieces in together for part in _encoded(encoder, pieces)]
        ends = np.cumsum([0, *map(len, ids)])
        return np.concatenate(ids), ends[np.cumsum([0, *map(len, several)])]

    return encode


def _encoded(encoder: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def _joined(several: list[np.ndarray]) -> Ids:
    return np.concatenate(several), np.cumsum([0, *map(len, several)])


def _gigatoken(description: str) -> Encode:
    engine = _imported().Tokenizer.from_json(description)

    def encode(texts: list[bytes]) -> Ids:
        layout = engine.encode_batch(texts).layout
        return layout.content.data, layout.offsets.data

    return encode


# gigatoken would import awkward later, and swallow a request to stop that comes meanwhile.
MODULES = ("awkward", "gigatoken")
ENGINES = {FAST: _gigatoken}


def _imported() -> Any:
    return [importlib.import_module(module) for module in MODULES][-1]


def _import_fault() -> str | None:
    """Why the engine cannot be imported though it is installed; tried every time, since an installation may be mended."""
    try:
        _imported()
    except Exception as error:  # an installation can be broken in any way
        return f"it cannot be imported ({' '.join(str(error).split())[:200]})"
    return None


def agreed(fast: Encode, slow: Encode, cut: Cut) -> Encode:
    """The fast engine, but for pieces of text with characters younger than this Python's Unicode, which the reference encodes.

    The tables of the engines are of different versions of Unicode: what is a letter to one is none to another, and words are cut
    elsewhere (gigatoken 0.10.0 and U+16ED1, for one).
    """

    def encode(texts: list[bytes]) -> Ids:
        ids, offsets = fast(texts)
        if not _is_young(b"".join([text for text in texts if not text.isascii()])):
            return ids, offsets
        young = [number for number, text in enumerate(texts) if _is_young(text)]
        several = np.split(ids, offsets[1:-1])
        for number in young:
            pieces = (piece.encode() for piece in cut(texts[number].decode()))
            parts = [(slow if young else fast)([b"".join(part)])[0] for young, part in groupby(pieces, _is_young)]
            several[number] = np.concatenate(parts)
        return _joined(several)

    return encode


def _is_young(text: bytes) -> bool:
    if text.isascii():
        return False
    rest = text.translate(None, ASCII).decode()  # most of it is ASCII in most texts
    return bool(_young_characters().take(np.frombuffer(rest.encode("utf-32-le"), "<u4"), mode="clip").any())


@cache
def _young_characters() -> np.ndarray:
    """bool [BEYOND + 1]: which characters this Python's Unicode does not know; the last stands for all that follow."""
    return np.array([category(chr(number)) == "Cn" for number in range(BEYOND)] + [True])


def open_engine(name: str, tokenizer: Tokenizer) -> Encode:
    """The engine of that name over this tokenizer's documents, in which no text yields a special token.

    A fast engine checks itself on one document of SAMPLED.

    Raises:
        EngineDiffers: while encoding, a sampled document has other ids than the reference's.
        DataError: while encoding, the tokenizer is beyond its limits.
    """
    encoder = encoder_of(tokenizer)
    encode = reference(encoder) if name == REFERENCE else _checking(name, encoder)
    return lambda texts: within_limits(lambda: encode(texts), sum(map(len, texts)))


def _checking(name: str, encoder: Tokenizer) -> Encode:
    slow, encoded = reference(encoder), 0
    fast = agreed(ENGINES[name](encoder.to_str()), slow, cut_of(encoder))

    def encode(texts: list[bytes]) -> Ids:
        nonlocal encoded
        ids, offsets = fast(texts)
        for number in range(-encoded % SAMPLED, len(texts), SAMPLED):
            text, found = texts[number], ids[offsets[number] : offsets[number + 1]]
            if len(text) > LONGEST_SAMPLED:
                text = text[:LONGEST_SAMPLED].decode(errors="ignore").encode()  # no part of a character
                found = fast([text])[0]
            if not np.array_equal(found, slow([text])[0]):
                shown = text.decode()[:40]
                raise EngineDiffers(f"{name} gives other ids than {REFERENCE} for a text that begins {shown!r}")
        encoded += len(texts)
        return ids, offsets

    return encode


def choose_engine(tokenizer: Tokenizer, cache: Path) -> EngineChoice:
    """Which engine encodes: the faster one where it is installed and gives the reference's ids, and why it does not.

    It is compared with the reference on `golden` texts, once per tokenizer and version; `open_engine` compares it on the real text.

    Args:
        cache: folder with a file for each engine, version and tokenizer that was checked.
    """
    refused: dict[str, str] = {}
    if number := _installed():
        fault = within_limits(_import_fault, 0, FAST) or _checked(FAST, number, tokenizer, cache)
        if fault is None:
            return EngineChoice(name=FAST, version=number, refused=refused)
        refused[FAST] = fault
        log.warning("%s %s is not used for this tokenizer: %s", FAST, number, fault)
    return reference_engine(refused)


def reference_engine(refused: dict[str, str] | None = None) -> EngineChoice:
    """`tokenizers` itself; `refused`: why another does not encode, by its name."""
    return EngineChoice(name=REFERENCE, version=version(REFERENCE), refused=refused or {})


def _installed() -> str | None:
    try:
        return version(FAST)
    except PackageNotFoundError:
        return None


def refuse(name: str, tokenizer: Tokenizer, cache: Path, fault: str) -> None:
    """Remembers that an engine is not to be used for this tokenizer."""
    _remember(_file(cache, name, version(name), tokenizer), fault)


def _checked(name: str, number: str, tokenizer: Tokenizer, cache: Path) -> str | None:
    file = _file(cache, name, number, tokenizer)
    try:
        return json.loads(file.read_text(encoding="utf-8"))["fault"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not checked yet, or a damaged note: the check is made (again)
    sample = golden(tokenizer)
    size = 2 * sum(map(len, sample))
    fault = within_limits(lambda: compare(name, tokenizer, sample), size, f"{REFERENCE} or {name}")
    _remember(file, fault)
    return fault


def _remember(file: Path, fault: str | None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps({"fault": fault}))


def _file(cache: Path, name: str, number: str, tokenizer: Tokenizer) -> Path:
    key = checksum_of([name, number, version(REFERENCE), description_of(tokenizer)]).removeprefix("blake3:")
    return cache / f"{name}-{number}-{key[:16]}.json"


def compare(name: str, tokenizer: Tokenizer, texts: list[bytes]) -> str | None:
    """What is wrong with an engine on these texts, None where every id is the reference's."""
    encoder = encoder_of(tokenizer)
    try:
        slow = reference(encoder)
        fast = agreed(ENGINES[name](encoder.to_str()), slow, cut_of(encoder))
        for start in range(0, len(texts), COMPARED):
            several = texts[start : start + COMPARED]
            (ids, offsets), (right, ends) = fast(several), slow(several)
            for number, text in enumerate(several):
                first, last = offsets[number : number + 2]
                if not np.array_equal(ids[first:last], right[ends[number] : ends[number + 1]]):
                    return f"it gives other ids than {REFERENCE} for a text that begins {text.decode()[:40]!r}"
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        return f"it does not take the tokenizer ({' '.join(str(error).split())[:200]})"
    return None


def golden(tokenizer: Tokenizer) -> list[bytes]:
    """The same texts every time: what words are cut at, special tokens written out, and strings of all of Unicode."""
    choose = random.Random(2404)
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    texts = ["", " ", "\n\n", "a" * 5000, " " * 3000, "don't we'LL I'd", "3.14159 1,000,000 0x1F", *special]
    texts += [f"a{token}b {token}" for token in ["<|endoftext|>", "</s>", "[UNK]", *islice(special, 50)]]
    for number in range(FUZZ_STRINGS):
        alphabet = "".join(choose.sample(ALPHABETS, k=choose.randint(1, 3)))
        letters = choose.choices(alphabet, k=choose.randint(1, 60))
        if number % 4 == 0:
            letters += [
                chr(choose.choice((choose.randrange(0xD800), choose.randrange(0xE000, 0x110000)))) for _ in range(8)
            ]
            choose.shuffle(letters)
        texts.append("".join(letters))
    return [text.encode() for text in texts]
