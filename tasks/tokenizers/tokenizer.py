"""Tokenizers over bytes, trained or given, in the form of `tokenizers` (tokenizer.json)."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from infini_llama.configs.errors import ConfigError, PipelineError, is_panic
from infini_llama.configs.pointers import refuse_pointer
from infini_llama.configs.reading import expanded, once
from infini_llama.configs.schema.tokenizer import TokenizerConfig
from infini_llama.tasks.storage.dataset_files import TOKENIZER
from infini_llama.tasks.storage.hf_folder import (
    CONVERT_TOKENIZER,
    OTHER_TOKENIZERS,
    refuse_other_added_tokens,
)
from infini_llama.tasks.tokenizers.fragments import cut_of
from infini_llama.tasks.tokenizers.tiktoken_encodings import (
    ENCODINGS,
    from_rank_file,
    rank_file,
)

EOS = "<|endoftext|>"
EOS_ID = 0
USUAL_ENDS = (EOS, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
MIN_FREQUENCY = 2  # of a pair that is merged
log = logging.getLogger("infini_llama.preprocess")
LONGEST_WORD = 100  # bytes of a word that WordPiece looks at; longer ones are cut
WORDS = f"[\\s\\S]{{1,{LONGEST_WORD}}}"


def train(texts: Iterable[str], settings: TokenizerConfig) -> Tokenizer:
    """Learn from `texts` the kind of tokenizer over bytes that the section `data.tokenizer` names.

    The end-of-text token is id 0, then come the other special tokens, all 256 bytes, and what is
    learned.

    - bpe: byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909, over bytes as in GPT-2).
    - wordpiece: the longest known piece first (Schuster and Nakajima 2012), here without a mark of
      continuation, so that every text has tokens and comes back whole.
    - unigram: a unigram language model (Kudo 2018, arXiv 1804.10959). Unlike the other kinds,
      `tokenizers` learns it a little differently in every process (its sums of floating-point
      numbers follow the order of a hash table): to have one again, keep its tokenizer.json and give
      it by its path.
    """
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned: dict[str, Any] = {
        "vocab_size": settings.vocab_size,
        "special_tokens": [EOS, *settings.special_tokens],
        "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet()),
        "show_progress": False,
    }
    match settings.kind:
        case "bpe":
            model = models.BPE()
            trainer = trainers.BpeTrainer(**learned, min_frequency=MIN_FREQUENCY)
        case "wordpiece":
            words = pre_tokenizers.Sequence(
                [words, pre_tokenizers.Split(Regex(WORDS), "isolated")]
            )
            model = models.WordPiece(
                unk_token=EOS,
                max_input_chars_per_word=LONGEST_WORD,
                continuing_subword_prefix="",
            )
            trainer = trainers.WordPieceTrainer(
                **learned, min_frequency=MIN_FREQUENCY, continuing_subword_prefix=""
            )
        case "unigram":
            model = models.Unigram()
            trainer = trainers.UnigramTrainer(**learned)
            # The scores of a model that is learned from nothing are no numbers.
            rest = iter(texts)
            texts = chain([next(rest, " ")], rest)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    cut = cut_of(tokenizer)
    tokenizer.train_from_iterator(
        (fragment for text in texts for fragment in cut(text)), trainer
    )
    return tokenizer


def byte_pair_tokenizer(
    tokens: Sequence[str], merges: list[tuple[str, str]], special: list[str]
) -> Tokenizer:
    """The tokenizer that `train` would give with these tokens, in the order of their IDs."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def is_given(settings: TokenizerConfig) -> bool:
    """Whether the section `data.tokenizer` names a tokenizer, and nothing is to be learned."""
    return bool(settings.path or settings.encoding)


def load(settings: TokenizerConfig) -> Tokenizer:
    """The tokenizer at `data.tokenizer.path`, or an encoding by name.

    The path is that of a tokenizer.json, a folder with one, or a tiktoken rank file. The tokenizer
    is used as it is, but for dropout, truncation and padding, which are off, and the end-of-text
    token, which is a special one.

    Raises:
        ConfigError: it is not there or not readable, its IDs are ambiguous or have gaps, files
            beside it give other ones, or it lacks one of `data.tokenizer.special_tokens`.
        DataError: it is a pointer to a file that was not downloaded, or a file beside it is
            damaged.
    """
    file = (
        rank_file(settings.encoding, settings.path)
        if settings.encoding
        else _file_of(settings)
    )
    tokenizer = _read(file, settings)
    tokenizer = _with_special_end(tokenizer, end_of_text(tokenizer, settings))
    if file.name == TOKENIZER:
        refuse_other_added_tokens(file.parent, tokenizer)
    added = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    missing = [token for token in settings.special_tokens if token not in special]
    if missing:
        raise ConfigError(
            f"data.tokenizer.special_tokens={missing}: {file} has no such special tokens; add them "
            "to it, or remove them here."
        )
    return tokenizer


def _read(file: Path, settings: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a file, as it is but for dropout, truncation and padding.

    Raises:
        ConfigError: it cannot be read, or its IDs are ambiguous or have gaps.
        DataError: it is a pointer to a file that was not downloaded.
    """
    encoding = ENCODINGS[settings.encoding] if settings.encoding else None
    named = f"encoding={settings.encoding}" if encoding else f"path={settings.path}"
    refuse_pointer(file)
    try:
        if encoding:
            return from_rank_file(file, encoding.pattern, encoding.special_tokens())
        if file.suffix == ".tiktoken":
            pattern = ENCODINGS["cl100k_base"].pattern
            return from_rank_file(file, pattern, [EOS, *settings.special_tokens])
        return _parsed(file.read_text(encoding="utf-8-sig"))
    except PipelineError:
        raise
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer.{named}: {file} cannot be read ({error.strerror}); name a "
            "tokenizer.json, a folder with one, or a .tiktoken rank file."
        ) from None
    except BaseException as error:  # `tokenizers` raises nothing narrower
        if isinstance(error, Exception) or is_panic(error):
            raise ConfigError(
                f"data.tokenizer.{named}: {file} is not a tokenizer ({error}){_cure(file)}."
            ) from None
        raise


def _cure(file: Path) -> str:
    """How to have a tokenizer.json in place of another file of a tokenizer; "": it is none."""
    if file.suffix == ".tiktoken" or not any(map(file.match, OTHER_TOKENIZERS)):
        return ""
    return (
        f"; write a {TOKENIZER} with transformers: {CONVERT_TOKENIZER}, and name that"
    )


def _file_of(settings: TokenizerConfig) -> Path:
    path = expanded(settings.path or "")
    return path / TOKENIZER if path.is_dir() else path


@lru_cache(maxsize=1)  # as `_parsed`; and the warning is logged once
def _with_special_end(tokenizer: Tokenizer, end: int) -> Tokenizer:
    """The tokenizer with its end-of-text token as a special one.

    Otherwise a text that spells the token would end there (data.tokenizer.split_special_tokens).
    """
    added = tokenizer.get_added_tokens_decoder()
    if end in added and added[end].special:
        return tokenizer
    name = tokenizer.id_to_token(end)
    log.warning(
        "the end-of-text token %r is no special token of the tokenizer; here it is one",
        name,
    )
    described = json.loads(description_of(tokenizer))
    token = {
        "id": end,
        "content": name,
        "special": True,
        "normalized": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    others = [other for other in described["added_tokens"] if other["id"] != end]
    return Tokenizer.from_str(
        json.dumps(
            described | {"added_tokens": sorted([*others, token], key=itemgetter("id"))}
        )
    )


# A large vocabulary takes long, and the key and the build both need it.
@lru_cache(maxsize=1)
def _parsed(description: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, whose IDs do not depend on chance or a text's length.

    Raises:
        ValueError: its IDs are ambiguous or have gaps.
    """
    tokenizer = Tokenizer.from_str(description)
    _refuse_ambiguous(tokenizer, description)
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        log.warning(
            "the tokenizer has a dropout of %g, which gives a text other tokens each time; it is "
            "off here",
            dropout,
        )
        tokenizer.model.dropout = None  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _refuse_ambiguous(tokenizer: Tokenizer, description: str) -> None:
    """Require one ID for each token, and one token for each ID from 0 on.

    What `tokenizers` reads otherwise, it reads in its own way.

    Raises:
        ValueError: it is not so.
    """
    described = json.loads(description, object_pairs_hook=once)
    vocabulary = described["model"]["vocab"]
    if isinstance(vocabulary, dict):
        pairs = list(vocabulary.items())
    else:  # of a unigram model
        pairs = [(piece, number) for number, (piece, _) in enumerate(vocabulary)]
    pairs += [
        (token["content"], token["id"]) for token in described.get("added_tokens", [])
    ]
    numbers = dict[str, int]()
    tokens = dict[int, str]()
    for token, number in pairs:
        if numbers.setdefault(token, number) != number:
            raise ValueError(
                f"it gives the token {token!r} two IDs; correct it, or use another one"
            )
        other = tokens.setdefault(number, token)
        if other != token:
            raise ValueError(
                f"it gives ID {number} to {other!r} and {token!r}; correct it, or use another one"
            )
    has_gaps = sorted(tokens) != list(range(len(tokens)))
    if has_gaps or tokenizer.get_vocab(with_added_tokens=True) != numbers:
        raise ValueError("it has IDs with gaps; use a tokenizer without gaps")


_described: list[tuple[Tokenizer, str]] = []  # the last one, for the same reason


def description_of(tokenizer: Tokenizer) -> str:
    """Its tokenizer.json; once it is loaded or trained, nothing changes a tokenizer."""
    if not _described or _described[0][0] is not tokenizer:
        _described[:] = [(tokenizer, tokenizer.to_str())]
    return _described[0][1]


def tokenizer_of(description: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json that `description_of` gave, here or in another process."""
    if _described and _described[0][1] == description:
        return _described[0][0]
    return Tokenizer.from_str(description)


def end_of_text(tokenizer: Tokenizer, settings: TokenizerConfig) -> int:
    """Id of the token that ends a document.

    It is EOS of a trained tokenizer; of a given one it is what it or the configuration states.

    Raises:
        ConfigError: nothing states it.
        DataError: the file that states it is a pointer to one that was not downloaded.
    """
    if not is_given(settings):
        return EOS_ID
    file = _file_of(settings)
    names = [settings.eos] if settings.eos else []
    is_rank_file = settings.encoding or file.suffix == ".tiktoken"
    for stated in (
        file.with_name("tokenizer_config.json"),
        file.with_name("special_tokens_map.json"),
    ):
        if not names and not is_rank_file:
            refuse_pointer(stated)
            names = _stated_end(stated) if stated.is_file() else []
    for name in names or USUAL_ENDS:
        number = tokenizer.token_to_id(name)
        if number is not None:
            return number
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    shown = ", ".join(added[:10]) or "none"
    raise ConfigError(
        "data.tokenizer.eos: the tokenizer has no end-of-text token "
        f"'{names[0] if names else EOS}'; set the one that ends a document, or eos_token in the "
        f"tokenizer_config.json beside it (its added tokens: {shown})."
    )


def _stated_end(file: Path) -> list[str]:
    """The end-of-text token that a tokenizer_config.json or special_tokens_map.json names, if any.

    Returns:
        No name or one.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        stated = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        fault = error.strerror
    except (ValueError, RecursionError):
        fault = "it is not JSON"
    else:
        match stated:
            case {"eos_token": str(name)} | {"eos_token": {"content": str(name)}}:
                return [name] if name else []
            case {"eos_token": value} if value is not None:
                fault = "its eos_token is no token"
            case dict():
                return []
            case _:
                fault = "it is not a JSON object"
    raise ConfigError(
        f"data.tokenizer.path: {file} cannot be used ({fault}); repair it, or remove it and set "
        "data.tokenizer.eos."
    )


def identity(settings: TokenizerConfig) -> Mapping[str, object]:
    """The part of the key that decides the tokens.

    It has the settings of a tokenizer to train, and the content of a given one.
    """
    policy = {
        "eos": EOS,
        "text_yields_special_tokens": not settings.split_special_tokens,
    }
    if settings.encoding:  # a key must not cost the reading of 200,000 ranks
        encoding = ENCODINGS[settings.encoding]
        return policy | {
            "encoding": settings.encoding,
            "sha256": encoding.sha256,
            "ends": settings.eos or EOS,
            "pattern": encoding.pattern,
            "special_tokens": encoding.special_tokens(),
        }
    if settings.path:
        tokenizer = load(settings)
        return policy | {
            "given": description_of(tokenizer),
            "eos_id": end_of_text(tokenizer, settings),
        }
    trained: dict[str, object] = {
        "vocab_size": settings.vocab_size,
        "min_frequency": MIN_FREQUENCY,
        "kind": "byte-level bpe" if settings.kind == "bpe" else settings.kind,
    }
    if settings.special_tokens:
        trained["special_tokens"] = settings.special_tokens
    return trained | policy


def token_bytes(tokenizer: Tokenizer, split_special_tokens: bool) -> np.ndarray:
    """int32 [vocab]: bytes of text that each token stands for.

    They are 0 for special tokens and for an unknown one, which keeps none. They are exact for a
    tokenizer that `keeps_text`; the tokens of another one share the bytes of a text by them.

    Args:
        split_special_tokens: see `encoder_of`. False: a special token stands for the text that
            spells it, unless it ends a document.
    """
    added = tokenizer.get_added_tokens_decoder()
    prefix = getattr(tokenizer.model, "continuing_subword_prefix", None) or ""
    suffix = getattr(tokenizer.model, "end_of_word_suffix", None) or ""
    # Not the description of the whole tokenizer, which takes long.
    steps = [
        step.__getstate__()
        for step in (tokenizer.decoder, tokenizer.pre_tokenizer)
        if step
    ]
    alphabet = set[str]()
    if any(b"ByteLevel" in step for step in steps):
        alphabet.update(pre_tokenizers.ByteLevel.alphabet())
    lengths = np.zeros(tokenizer.get_vocab_size(), dtype=np.int32)
    vocabulary = tokenizer.get_vocab()
    learned = [token for token, number in vocabulary.items() if number not in added]
    of_bytes = alphabet.issuperset("".join(learned))
    for token, number in vocabulary.items():
        if number in added:
            is_no_text = added[number].special and split_special_tokens
            lengths[number] = 0 if is_no_text else len(token.encode())
            continue
        written = token.removeprefix(prefix)
        if suffix and written.endswith(suffix):
            written = f"{written.removesuffix(suffix)} "  # the end of a word stands for a space
        if of_bytes or (alphabet and alphabet.issuperset(token)):
            # One character of the byte alphabet is one byte.
            lengths[number] = len(written)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            lengths[number] = 1
        else:
            lengths[number] = len(written.replace("▁", " ").encode())
    unknown = unknown_id(tokenizer)
    # A special token that text may spell stands for its own bytes, also if it is the unknown one.
    if unknown is not None and (unknown not in added or split_special_tokens):
        lengths[unknown] = 0
    return lengths


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The token that stands for text without another one; None: there is none."""
    if isinstance(tokenizer.model, models.Unigram):
        # Only its description has it, which takes long to write.
        return json.loads(description_of(tokenizer))["model"].get("unk_id")
    unknown = getattr(tokenizer.model, "unk_token", None)
    return None if unknown is None else tokenizer.token_to_id(unknown)
