"""A tiktoken rank file as a tokenizer of `tokenizers`, with the same ids for the same text."""

import base64
import binascii
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers


def from_rank_file(file: Path, pattern: str, special: list[str]) -> Tokenizer:
    """Lines 'base64-of-bytes rank'; special tokens get the ids after the last rank.

    tiktoken joins the two neighbours whose joined bytes have the lowest rank. The same as merges: every way to make a
    token of two, in the order of the tokens' ranks; and a word that is a token as a whole is that token.

    Raises:
        ValueError: no rank file.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} is not 'base64 rank'") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("its ranks are not 0, 1, 2, … with all 256 bytes among them")
    letters = _letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], spelled(left), spelled(right)))
    merges.sort()
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    model = models.BPE(vocabulary, [merge[3:] for merge in merges], ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _letters() -> list[str]:
    """The letter that stands for each byte (GPT-2's byte alphabet): printable ones for themselves, others from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
