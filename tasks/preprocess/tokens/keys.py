"""Keys name, digests prove: a key is a hash of what determines the content, known before the work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.tokenizers.tokenizer import identity as tokenizer_identity
from infini_llama.tasks.records.manifest import RowTableContent
from infini_llama.tasks.storage.artifacts import FORMAT_VERSIONS, checksum_of

TOKENS_VERSION, CHUNKS_VERSION = FORMAT_VERSIONS["dataset"], FORMAT_VERSIONS["chunks"]


@dataclass(frozen=True)
class SourceUnits:
    """Names of the units of one of data.sources, or of the section `data` (name ""), in order.

    Attributes:
        mixed: of files that are training text, and of which a share may be held out, document by document.
        held_out: of files or a split that are validation text as a whole.
    """

    name: str
    mixed: Sequence[str]
    held_out: Sequence[str]


def tokens_key(data: DataConfig, sources: Sequence[SourceUnits]) -> str:
    """64 hex digits for the token level: text, split and tokenizer; no path, device or time."""
    return _hex(
        {
            "version": TOKENS_VERSION,
            "tokenizer": tokenizer_identity(data.tokenizer),
            "deduplicate": data.deduplicate,
            "answer_after": data.answer_after,
            "sources": [[source.name, list(source.mixed), list(source.held_out)] for source in sources],
        }
    )


def learned_key(data: DataConfig, sources: Sequence[SourceUnits]) -> str:
    """64 hex digits for a tokenizer that is learned from these sources."""
    names = [[list(source.mixed), list(source.held_out)] for source in sources]
    return _hex({"tokenizer": tokenizer_identity(data.tokenizer), "sources": names})


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
