"""Keys name, digests prove: a key is a hash of what determines the content, known before the work."""

from tasks.artifacts import checksum_of
from tasks.preprocess.sources import Document
from tasks.preprocess.tokenizers import EOS

TOKENS_VERSION, CHUNKS_VERSION = 1, 1


def tokens_key(data: dict, documents: list[Document]) -> str:
    """64 hex digits for the token level: text, split, tokenizer and layout; no absolute path, device or time."""
    return _hex(
        {
            "version": TOKENS_VERSION,
            "documents": [[document.name, document.size, document.hash] for document in documents],
            "validation_fraction": data["validation_fraction"],
            "tokenizer": data["tokenizer"]
            | {"kind": "byte-level bpe", "eos": EOS, "text_yields_special_tokens": False},
            "shard_size": data["shard_size"],
        }
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
    )


def is_validation(document: Document, fraction: float) -> bool:
    """Whether the document is held out: decided by its content alone, so that adding files moves none."""
    return int(document.hash[:16], 16) < fraction * 2**64


def _hex(value: dict) -> str:
    return checksum_of(value).removeprefix("blake3:")
