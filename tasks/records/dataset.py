"""A dataset artifact as the stages name it, and what verify-data found in it."""

from pathlib import Path

from pydantic import Field

from infini_llama.tasks.records.record import Record


class SplitStats(Record):
    """Size of one split. unigram_entropy_bits: per token."""

    documents: int
    tokens: int
    bytes: int
    unigram_entropy_bits: float
    rows: int


class RowTableRef(Record):
    """A row table of a dataset: chunks/<chunks>; `rows`: training rows of `sequence_length` tokens."""

    chunks: str
    chunks_digest: str
    sequence_length: int
    rows: int


class DatasetRef(Record):
    """A complete dataset artifact and the row table that a run trains on.

    Attributes:
        path: relative to the home folder.
        digest: of the token level; chunks_digest: of the row table chunks/<chunks>.
        built: which levels this call built ("tokens", "chunks"); empty if all was there.
        curriculum: row tables of the shorter rows that training starts with, in order.
    """

    path: str
    digest: str
    chunks: str
    chunks_digest: str
    built: tuple[str, ...] = ()
    sequence_length: int
    vocab_size: int
    train: SplitStats
    validation: SplitStats
    curriculum: tuple[RowTableRef, ...] = ()

    @property
    def name(self) -> str:
        """Name of the dataset's folder."""
        return Path(self.path).name

    @property
    def row_tables(self) -> tuple[RowTableRef, ...]:
        """Every row table, the one of the full sequence length first."""
        own = RowTableRef(
            chunks=self.chunks,
            chunks_digest=self.chunks_digest,
            sequence_length=self.sequence_length,
            rows=self.train.rows,
        )
        return (own, *self.curriculum)


class Check(Record):
    """One check of a dataset; `detail`: what it found, for people."""

    name: str
    ok: bool
    detail: str


class SplitStatistics(Record):
    """What the deep check counted in one split, by name."""

    values: dict[str, int | float]


class VerifyReport(Record):
    """What verify-data checked.

    Attributes:
        level: "quick" or "deep".
        verify_on_read: the checksums of shards were not read; each shard is checked when it is first opened.
        statistics: of the deep check, by split.
    """

    level: str
    ok: bool
    checks: tuple[Check, ...]
    files: int
    checked_bytes: int
    seconds: float
    verify_on_read: bool
    statistics: dict[str, SplitStatistics] = Field(default_factory=dict)
