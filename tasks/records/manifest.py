"""The content of manifest.json, typed for the two levels of a dataset."""

from typing import Any, Generic, TypeVar

from pydantic import ConfigDict, Field, NonNegativeInt

from infini_llama.tasks.records.decision import Decision
from infini_llama.tasks.records.record import Record

Content = TypeVar("Content")
Meta = TypeVar("Meta")
Value = TypeVar("Value")
SPLITS = ("train", "validation")


class FileEntry(Record):
    """One file of an artifact.

    Attributes:
        size: bytes.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    size: NonNegativeInt
    checksum: str


class Manifest(Record, Generic[Content, Meta]):
    """The file that `artifacts.commit` writes last.

    Attributes:
        files: by relative path.
        content: facts that the bytes determine; part of the digest.
        digest: proves kind, format version, files and content.
        meta: when, from what, by whom; not part of the digest.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    kind: str
    format_version: int
    files: dict[str, FileEntry]
    content: Content
    digest: str
    created: str
    meta: Meta
    self_checksum: str


class BySplit(Record, Generic[Value]):
    """One value per split."""

    train: Value
    validation: Value

    def __getitem__(self, split: str) -> Value:
        return self.train if split == SPLITS[0] else self.validation


class ContentRecord(Record):
    """The content of an artifact. A field with its default value is left out of the JSON."""

    json_without = "defaults"


class MetaRecord(Record):
    """Provenance. Only the fields that were given are in the JSON."""

    json_without = "unset"


class UnitSplit(Record):
    """Size of one split of a unit.

    Attributes:
        bytes: of text.
        shortest_document, longest_document: tokens; 0 where it has no documents.
    """

    documents: int
    tokens: int
    bytes: int
    shortest_document: int
    longest_document: int


class UnitMeta(MetaRecord):
    """Provenance of a unit.

    Attributes:
        key: the name of the unit.
    """

    key: str


class Shard(Record):
    """One Arrow file of a split.

    Attributes:
        source: where data.sources has several, the one that its documents are from.
    """

    file: str
    documents: int
    tokens: int
    source: str = ""
    first_document: int
    first_token: int


class SourceStats(Record):
    """Size of one source's part of a split.

    Attributes:
        bytes: of text.
    """

    name: str
    documents: int
    tokens: int
    bytes: int


class SplitContent(Record):
    """One split of the token level.

    Attributes:
        unigram_entropy_bits: of the tokens that count, per token.
        sources: empty if data.sources is.
    """

    documents: int
    tokens: int
    bytes: int
    shards: tuple[Shard, ...]
    shortest_document: int
    longest_document: int
    unigram_entropy_bits: float
    sources: tuple[SourceStats, ...] = ()


class DatasetContent(ContentRecord):
    """The token level.

    Attributes:
        lossless: decoding gives every text back.
        loss_on: "answer" where not all tokens count in the loss; see `has_loss_mask`.
    """

    vocab_size: int
    dtype: str
    eos_id: int
    text_yields_special_tokens: bool
    train: SplitContent
    validation: SplitContent
    lossless: bool = True
    loss_on: str = "all"

    @property
    def has_loss_mask(self) -> bool:
        """Whether the shards have a bit per token: whether it counts in the loss.

        All of a source with loss_on: all do. Without a mask, all tokens do.
        """
        return self.loss_on != "all"

    @property
    def has_document_bytes(self) -> bool:
        """Whether the bytes of each document are stored.

        Without them, the bytes of a text are those of its tokens. Where text yields special
        tokens, the one that ends a document stands for text elsewhere.
        """
        return not self.lossless or self.text_yields_special_tokens

    def __getitem__(self, split: str) -> SplitContent:
        return self.train if split == SPLITS[0] else self.validation


class LeftOut(Record):
    """Records that were read, and how many of them are not in the dataset, by reason.

    Attributes:
        duplicates: exact copies; in the dataset unless `duplicates_dropped`.
        also_validation: training texts that are also held out.
        bad: the first damaged places, in words.
        own_files: files of this program that patterns of text match, by place.
        other_files: files in folders of text that were not read, by kind.
    """

    records: int = 0
    empty: int = 0
    too_short: int = 0
    duplicates: int = 0
    also_validation: int = 0
    bad_records: int = 0
    bad_files: int = 0
    bad: tuple[str, ...] = ()
    own_files: dict[str, int] = Field(default_factory=dict)
    other_files: dict[str, int] = Field(default_factory=dict)
    duplicates_dropped: bool = False

    def reasons(self) -> dict[str, int]:
        """Numbers of records that are left out, by reason, in words.

        Duplicates that are kept are counted, too.
        """
        kept = "" if self.duplicates_dropped else " (kept: data.deduplicate is off)"
        counts = {
            "empty": self.empty,
            "too short": self.too_short,
            f"exact duplicates{kept}": self.duplicates,
            "also in the validation text": self.also_validation,
            "damaged records": self.bad_records,
            "damaged files": self.bad_files,
        }
        return {reason: count for reason, count in counts.items() if count}


class Inexpressible(Record):
    """Text that the tokenizer has no token for.

    Attributes:
        unknown: unknown tokens in its place.
        share: of all text, in bytes.
        files: those that lose most, in words.
    """

    unknown: int = 0
    share: float = 0.0
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        files = "; ".join(self.files)
        return (
            f"the tokenizer has no token for {100 * self.share:.2g} % of the text "
            f"({self.unknown:,} unknown tokens): {files}"
        )


class EngineChoice(Record):
    """The tokenizing engine that encodes.

    Attributes:
        refused: why another does not, by its name.
    """

    name: str
    version: str
    refused: dict[str, str]


class Origin(MetaRecord):
    """The origin of one source's text, beside the keys of its section, which are in `DatasetMeta`.

    Attributes:
        source: value of the key of this name.
        name: of the source in data.sources; "" for the section `data`.
        facts: what the source states of its text, by its own names.
        loss_on: "answer" where only the labels of answers count.
    """

    source: str
    license: str
    name: str = ""
    weight: float | None = None
    loss_on: str = "all"
    facts: dict[str, str] = Field(default_factory=dict)


class Provenance(Record):
    """The origin of text: of each source, in the order of names."""

    sources: tuple[Origin, ...] = ()

    @property
    def source(self) -> str:
        return self.sources[0].source if len(self.sources) == 1 else "mixture"

    @property
    def license(self) -> str:
        return "; ".join(sorted({source.license for source in self.sources}))


class DatasetMeta(MetaRecord):
    """Provenance of the token level.

    Attributes:
        data: the configuration's section as it was when the dataset was built.
        infini_llama, tokenizers: versions.
        recipe: of the units that it was made of.
        workers: how many prepared the text, and why; None where data.num_workers says it.
        inexpressible: of its text, with the files that had it when the dataset was built.
        spelled_special_tokens: that sampled documents spell, and that are text.
    """

    provenance: Provenance = Provenance()
    key: str = ""
    data: dict[str, Any] = Field(default_factory=dict)
    left_out: LeftOut = LeftOut()
    inexpressible: Inexpressible = Inexpressible()
    spelled_special_tokens: tuple[str, ...] = ()
    infini_llama: str = ""
    tokenizers: str = ""
    engine: EngineChoice | None = None
    recipe: str = ""
    workers: Decision | None = None


class SourceRows(Record):
    """The number of rows of a table that are of one source."""

    name: str
    rows: int


class RowTableContent(ContentRecord):
    """A row table.

    Attributes:
        stride: of strategy window.
        sources: in the order of their rows, if data.sources has several.
    """

    strategy: str
    sequence_length: int
    rows: BySplit[int]
    stride: int | None = None
    sources: BySplit[tuple[SourceRows, ...]] | None = None


class RowCosts(Record):
    """The cost of a way to cut rows.

    Attributes:
        efficiency: share of the rows' positions that hold tokens.
        lost_tokens: in no row.
        targets: labels that count.
    """

    efficiency: float
    cut_documents: int
    lost_tokens: int
    targets: int = 0


class RowTableMeta(MetaRecord):
    """Provenance of a row table.

    Attributes:
        device: what computed it.
        unigram_entropy_bits: of the targets of the validation rows, per target: the loss of the
            best model that knows frequencies alone. It stands beside their loss.
    """

    key: str = ""
    device: str = ""
    packing: BySplit[RowCosts] | None = None
    infini_llama: str = ""
    unigram_entropy_bits: float | None = None


UnitManifest = Manifest[BySplit[UnitSplit], UnitMeta]
AnyManifest = Manifest[dict[str, Any], dict[str, Any]]
DatasetManifest = Manifest[DatasetContent, DatasetMeta]
RowTableManifest = Manifest[RowTableContent, RowTableMeta]
