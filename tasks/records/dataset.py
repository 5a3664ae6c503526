"""A dataset artifact as the stages name it, what verify-data found in it, and what it holds."""

from pathlib import Path

from pydantic import ConfigDict, Field

from infini_llama.tasks.records.decision import Decision
from infini_llama.tasks.records.manifest import (
    BySplit,
    Inexpressible,
    LeftOut,
    RowCosts,
    RowTableContent,
)
from infini_llama.tasks.records.record import Record


class SplitStats(Record):
    """Size of one split. unigram_entropy_bits: per token."""

    documents: int
    tokens: int
    bytes: int
    unigram_entropy_bits: float
    rows: int


class RowTableRef(Record):
    """A row table of a dataset, chunks/<row_table>.

    Attributes:
        rows: training rows of `sequence_length` tokens.
    """

    row_table: str
    row_table_digest: str
    sequence_length: int
    rows: int


class TextSummary(Record):
    """Text as a run reads it.

    The dataset does not depend on it: other files with the same text have the same dataset.
    """

    source: str = ""
    license: str = ""
    left_out: LeftOut = LeftOut()


class DatasetRef(Record):
    """A complete dataset artifact and the row table that a run trains on.

    Attributes:
        path: relative to the home folder.
        digest: of the token level.
        row_table_digest: of the row table chunks/<row_table>.
        built: which levels this call built ("tokens", "row tables"); empty if all was there.
        text: that was read by this call; of a dataset that is named by its folder, by the call that
            built it.
        curriculum: row tables of the shorter rows that training starts with, in order; without any,
            the JSON has no such field.
    """

    path: str
    digest: str
    row_table: str
    row_table_digest: str
    built: tuple[str, ...] = ()
    sequence_length: int
    vocab_size: int
    train: SplitStats
    validation: SplitStats
    text: TextSummary = TextSummary()
    curriculum: tuple[RowTableRef, ...] = Field(
        default=(), exclude_if=lambda tables: not tables
    )

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def row_tables(self) -> tuple[RowTableRef, ...]:
        """Every row table once, the one of the full sequence length first."""
        full_length = RowTableRef(
            row_table=self.row_table,
            row_table_digest=self.row_table_digest,
            sequence_length=self.sequence_length,
            rows=self.train.rows,
        )
        by_name = {table.row_table: table for table in (full_length, *self.curriculum)}
        return tuple(by_name.values())


class PlannedTable(Record):
    """A row table that may not exist yet; row_table_key: 64 hex digits."""

    row_table_key: str

    @property
    def row_table(self) -> str:
        """Name of its folder below chunks/."""
        return self.row_table_key[:12]


class DatasetPlan(Record):
    """The dataset that `preprocess` would build, known before text is tokenized.

    Attributes:
        key: of the token level, 64 hex digits.
        table: of rows of data.sequence_length.
        curriculum: row tables of shorter rows, in order.
        name: of the folder below datasets/.
    """

    key: str
    table: PlannedTable
    curriculum: tuple[PlannedTable, ...]
    name: str

    @property
    def row_tables(self) -> tuple[PlannedTable, ...]:
        """Every row table once, the one of the full sequence length first."""
        by_name = {table.row_table: table for table in (self.table, *self.curriculum)}
        return tuple(by_name.values())


class Check(Record):
    """A check that a dataset has passed; `detail`: what it found, for people."""

    name: str
    detail: str


class VerifyReport(Record):
    """The result of verify-data for a dataset that passed every check; otherwise there is an error.

    Attributes:
        level: "quick" or "deep".
        verify_on_read: the checksums of shards were not read; each shard is checked when it is
            first opened.
    """

    level: str
    checks: tuple[Check, ...]
    files: int
    checked_bytes: int
    seconds: float
    verify_on_read: bool


class DocumentLengths(Record):
    """Quantiles of the tokens per document."""

    shortest: int
    p5: int
    median: int
    p95: int
    longest: int


class SplitSummary(Record):
    """One split, for people; `shards`: how many."""

    documents: int
    tokens: int
    bytes: int
    bytes_per_token: float
    shards: int
    unigram_entropy_bits: float
    document_tokens: DocumentLengths


class SourceSummary(Record):
    """One of several sources, for people."""

    model_config = ConfigDict(serialize_by_alias=True)

    weight: float | None
    license: str
    loss_on: str = Field(serialization_alias="loss on")
    documents: int
    tokens: int
    bytes: int
    validation_documents: int = Field(serialization_alias="validation documents")
    validation_tokens: int = Field(serialization_alias="validation tokens")


class RowTableSummary(RowTableContent):
    """A row table and what it costs."""

    packing: BySplit[RowCosts] | None = None


class DatasetSummary(Record):
    """The content of a dataset, for people.

    Attributes:
        workers: that built it, if they were chosen.
        sources: by name, if data.sources has several.
        row_tables: by name.
        samples: training rows as text.
    """

    json_without = "unset"

    path: str
    digest: str
    created: str
    source: str
    license: str
    vocab_size: int
    dtype: str
    bytes_on_disk: int
    workers: Decision | None = None
    splits: BySplit[SplitSummary]
    sources: dict[str, SourceSummary] = Field(default_factory=dict)
    row_tables: dict[str, RowTableSummary]
    left_out: LeftOut
    inexpressible: Inexpressible
    samples: tuple[str, ...]
