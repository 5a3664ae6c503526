"""Keys name, digests prove: a key is a hash of what determines the content, known before the work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.tokenizers.tokenizer import identity as tokenizer_identity
from infini_llama.tasks.records.manifest import RowTableContent
from infini_llama.tasks.storage.artifacts import FORMAT_VERSIONS, checksum_of

TOKENS_VERSION, CHUNKS_VERSION = FORMAT_VERSIONS["dataset"], FORMAT_VERSIONS["chunks"]


@dataclass(frozen=True)
class SourceText:
    """The text of one of data.sources, or of the section `data` (name ""): names of units, in order.

    Attributes:
        validation: of files or a split that are validation text as a whole.
    """

    name: str
    training: Sequence[str]
    validation: Sequence[str]


def tokens_key(data: DataConfig, texts: Sequence[SourceText]) -> str:
    """64 hex digits for the token level: text, split and tokenizer; no path, device or time."""
    return _hex(
        {
            "version": TOKENS_VERSION,
            "tokenizer": tokenizer_identity(data.tokenizer),
            "deduplicate": data.deduplicate,
            "answer_after": data.answer_after,
            "sources": [[text.name, list(text.training), list(text.validation)] for text in texts],
        }
    )


def learned_key(data: DataConfig, texts: Sequence[SourceText]) -> str:
    """64 hex digits for a tokenizer that is learned from these texts."""
    sources = [[list(text.training), list(text.validation)] for text in texts]
    return _hex({"tokenizer": tokenizer_identity(data.tokenizer), "sources": sources})


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
