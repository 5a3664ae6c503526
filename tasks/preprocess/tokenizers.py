"""Byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909, over bytes as in GPT-2), trained and applied by `tokenizers`."""

import json
from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|endoftext|>"
EOS_ID = 0


def train_bpe(texts: Iterable[str], vocab_size: int, min_frequency: int) -> Tokenizer:
    """A tokenizer with the end-of-text token as id 0, all 256 bytes, and merges learned from `texts`; the same for the same texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encoder_of(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer for documents: without added tokens, so that no text, whatever it contains, yields the end-of-text id."""
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(description))


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """int32 [vocab]: bytes of text that each token stands for; 0 for the end-of-text token."""
    lengths = np.zeros(tokenizer.get_vocab_size(), dtype=np.int32)
    for token, number in tokenizer.get_vocab().items():
        lengths[number] = 0 if number == EOS_ID else len(token)  # one character of the byte alphabet is one byte
    return lengths
