"""Keys name, digests prove: a key is a hash of what determines the content, known before the work."""

from typing import Any

from infini_llama.tasks.preprocess.tokenizers.tokenizer import identity as tokenizer_identity
from infini_llama.tasks.storage.artifacts import checksum_of

TOKENS_VERSION, CHUNKS_VERSION = 1, 1


def tokens_key(data: dict, identity: dict[str, Any], units: int = 1) -> str:
    """64 hex digits for the token level: text, split, tokenizer and layout; no absolute path, device or time.

    Args:
        identity: names, sizes and hashes of the text that is kept (of `corpus.survey`).
        units: into how many units of work the training text is cut; the layout of more than one is a later one.
    """
    return _hex(
        {
            "version": TOKENS_VERSION,
            "validation_fraction": data["validation_fraction"],
            "tokenizer": tokenizer_identity(data["tokenizer"]),
            "shard_size": data["shard_size"],
        }
        | identity
        | ({"layout": "a shard a unit"} if units > 1 else {})
    )


def chunks_key(data: dict, tokens: str) -> str:
    """64 hex digits for the chunk level of one strategy and length."""
    return _hex(
        {
            "version": CHUNKS_VERSION,
            "tokens": tokens,
            "strategy": data["strategy"],
            "sequence_length": data["sequence_length"],
        }
        | ({"stride": data["stride"]} if data["strategy"] == "window" else {})
    )


def _hex(value: dict) -> str:
    return checksum_of(value).removeprefix("blake3:")
