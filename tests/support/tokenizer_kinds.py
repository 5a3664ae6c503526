"""Small tokenizers of the kinds that users bring, in the forms in which Hugging Face's converters write them."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from infini_llama.configs.schema import TokenizerConfig
from infini_llama.tasks.tokenizers.tokenizer import train

END, UNKNOWN = "</s>", "<unk>"
TEXTS = [
    "The river runs past the old mill, and the miller's cat doesn't look up.",
    "It was the best of times; it was the worst of times (or so they said).",
    "def value(self): return self.value  # 3.14",
    "größer als ein Fluß, naïve café",
] * 10
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACES_BACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _learned(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _with_byte_fallback(tokenizer: Tokenizer) -> Tokenizer:
    """BPE over characters, with the 256 bytes for all others, as SentencePiece learns it."""
    special = [UNKNOWN, "<s>", END, *BYTES]
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=special, show_progress=False
    )
    described = json.loads(_learned(tokenizer, trainer).to_str())
    described["model"] |= {"unk_token": UNKNOWN, "byte_fallback": True}
    described["added_tokens"] = [
        token for token in described["added_tokens"] if token["content"] not in BYTES
    ]
    return Tokenizer.from_str(json.dumps(described))


def llama2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence([*SPACES_BACK, decoders.Strip(" ", 1, 0)])
    return _with_byte_fallback(tokenizer)


def mistral() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first", split=False
    )
    tokenizer.decoder = decoders.Sequence([*SPACES_BACK, decoders.Strip(" ", 1, 0)])
    return _with_byte_fallback(tokenizer)


def gemma(*steps: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([*SPACES_BACK, *steps])
    return _with_byte_fallback(tokenizer)


def t5() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
    )
    special = [UNKNOWN, END]
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=special,
        unk_token=UNKNOWN,
        show_progress=False,
        max_piece_length=8,
    )
    return _learned(tokenizer, trainer)


def unigram_with_bytes() -> Tokenizer:
    pieces = [(UNKNOWN, 0.0), (END, 0.0), *((byte, -9.0) for byte in BYTES)]
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "▁")})
    words = sorted({"▁" + word for text in TEXTS for word in text.split()})
    pieces += [
        *((letter, -6.0) for letter in letters),
        *((word, -4.0) for word in words),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace()]
    )
    tokenizer.add_special_tokens([UNKNOWN, END])
    return tokenizer


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    tokenizer.decoder = decoders.WordPiece()
    special = [UNKNOWN, END]
    return _learned(
        tokenizer,
        trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=special, show_progress=False
        ),
    )


def gpt1() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN, end_of_word_suffix="</w>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200,
        special_tokens=[UNKNOWN, END],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    return _learned(tokenizer, trainer)


def words() -> Tokenizer:
    """A token per word, and no decoder."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _learned(
        tokenizer,
        trainers.WordLevelTrainer(special_tokens=[UNKNOWN, END], show_progress=False),
    )


def speech() -> Tokenizer:
    """Letters whose repetitions are one, as CTC decodes them, and pairs of letters that are decoded as another one."""
    tokenizer = Tokenizer(
        models.WordLevel(
            {letter: id for id, letter in enumerate(["<pad>", "|", *"abcde"])}, "<pad>"
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.CTC(), decoders.Fuse(), decoders.Replace("de", "X")]
    )
    return tokenizer


def train_bpe(
    texts: Iterable[str], vocab_size: int, special: Iterable[str] = ()
) -> Tokenizer:
    return train(
        texts, TokenizerConfig(vocab_size=vocab_size, special_tokens=[*special])
    )


def _over_bytes(kind: str) -> Callable[[], Tokenizer]:
    return lambda: train(
        TEXTS, TokenizerConfig.model_validate({"kind": kind, "vocab_size": 320})
    )


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level bpe": lambda: train_bpe(TEXTS, 350),
    "byte-level wordpiece": _over_bytes("wordpiece"),
    "byte-level unigram": _over_bytes("unigram"),
    "llama2": llama2,
    "mistral": mistral,
    "gemma": gemma,
    "two spaces stripped": lambda: gemma(decoders.Strip(" ", 2, 0)),
    "t5": t5,
    "unigram with bytes": unigram_with_bytes,
    "bert": bert,
    "gpt1": gpt1,
    "words": words,
    "speech": speech,
}


@cache
def of_kind(kind: str) -> Tokenizer:
    """A tokenizer of this kind, made once; tests do not change it."""
    return KINDS[kind]()
