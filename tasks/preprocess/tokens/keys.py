"""Keys name, digests prove: a key is a hash of what determines the content, known before the work."""

from collections.abc import Mapping

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.tokenizers.tokenizer import identity as tokenizer_identity
from infini_llama.tasks.records.manifest import RowTableContent
from infini_llama.tasks.storage.artifacts import checksum_of

TOKENS_VERSION, CHUNKS_VERSION = 1, 1


def tokens_key(data: DataConfig, identity: dict[str, object], units: int = 1) -> str:
    """64 hex digits for the token level: text, split, tokenizer and layout; no absolute path, device or time.

    Args:
        identity: names, sizes and hashes of the text that is kept (of `corpus.survey`).
        units: into how many units of work the training text is cut; the layout of more than one is a later one.
    """
    return _hex(
        {
            "version": TOKENS_VERSION,
            "validation_fraction": data.validation_fraction,
            "tokenizer": tokenizer_identity(data.tokenizer),
            "shard_size": int(data.shard_size),
        }
        | identity
        | ({"layout": "a shard a unit"} if units > 1 else {})
        | ({"answer_after": data.answer_after} if data.loss_on == "answer" else {})
    )


def chunks_key(rows: DataConfig | RowTableContent, tokens: str) -> str:
    """64 hex digits for the chunk level of one strategy and length."""
    strategy = rows.packing if isinstance(rows, DataConfig) else rows.strategy
    return _hex(
        {
            "version": CHUNKS_VERSION,
            "tokens": tokens,
            "strategy": strategy,
            "sequence_length": rows.sequence_length,
        }
        | ({"stride": rows.stride} if strategy == "window" else {})
    )


def _hex(value: Mapping[str, object]) -> str:
    return checksum_of(value).removeprefix("blake3:")
