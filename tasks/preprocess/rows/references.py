"""References to a dataset and its row tables, as `preprocess` returns them.

There are also those of a dataset that is named by its folder.
"""

from collections.abc import Iterable
from pathlib import Path

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.rows.tables import with_curriculum
from infini_llama.tasks.records.dataset import (
    DatasetRef,
    RowTableRef,
    SplitStats,
    TextSummary,
)
from infini_llama.tasks.storage.artifacts import (
    read_dataset,
    read_manifest,
    read_row_table,
    row_tables,
)


def table_ref(table: Path) -> RowTableRef:
    """The row table in folder `table`, as a reference names it."""
    manifest = read_row_table(table)
    return RowTableRef(
        row_table=table.name,
        row_table_digest=manifest.digest,
        sequence_length=manifest.content.sequence_length,
        rows=manifest.content.rows.train,
    )


def dataset_ref(
    dataset: Path,
    table: Path,
    home: Path,
    built: list[str],
    curriculum: Iterable[Path],
) -> DatasetRef:
    """The reference of the dataset in folder `dataset` with its row table in folder `table`.

    Args:
        home: which the path is relative to, if the dataset is below it.
        built: what was missing before: "tokens", "row tables".
        curriculum: folders of the row tables of shorter rows.
    """
    tokens = read_dataset(dataset)
    row_table = read_row_table(table)
    is_below_home = dataset.is_relative_to(home)

    def stats(split: str) -> SplitStats:
        facts = tokens.content[split]
        return SplitStats(
            documents=facts.documents,
            tokens=facts.tokens,
            bytes=facts.bytes,
            unigram_entropy_bits=facts.unigram_entropy_bits,
            rows=row_table.content.rows[split],
        )

    return DatasetRef(
        path=dataset.relative_to(home).as_posix() if is_below_home else str(dataset),
        digest=tokens.digest,
        row_table=table.name,
        row_table_digest=row_table.digest,
        built=tuple(built),
        sequence_length=row_table.content.sequence_length,
        vocab_size=tokens.content.vocab_size,
        train=stats("train"),
        validation=stats("validation"),
        text=TextSummary(
            source=tokens.meta.provenance.source,
            license=tokens.meta.provenance.license,
            left_out=tokens.meta.left_out,
        ),
        curriculum=tuple(map(table_ref, curriculum)),
    )


def reference_to_all(dataset: Path, home: Path) -> DatasetRef:
    """The reference of the dataset in this folder with every row table that it has.

    Raises:
        DataError: no dataset is there, or it has no row table.
    """
    first, *others = _tables(dataset)
    return dataset_ref(dataset, first, home, built=[], curriculum=others)


def reference_for(data: DataConfig, dataset: Path, home: Path) -> DatasetRef:
    """The reference with the rows that the section `data` requests, and those of its curriculum.

    Raises:
        ConfigError: the dataset has no such rows.
        DataError: no dataset is there, or it has no row table.
    """
    table, *stages = [_table_of(section, dataset) for section in with_curriculum(data)]
    return dataset_ref(dataset, table, home, built=[], curriculum=stages)


def _tables(dataset: Path) -> list[Path]:
    """Folders of the row tables, of which there is one at least."""
    read_manifest(dataset, "dataset")
    tables = row_tables(dataset)
    if not tables:
        raise DataError(
            f"{dataset} has no row table; "
            "run 'infini-llama preprocess' with its configuration again."
        )
    return tables


def _table_of(data: DataConfig, dataset: Path) -> Path:
    contents = {table: read_row_table(table).content for table in _tables(dataset)}
    for table, content in contents.items():
        if (
            content.sequence_length == data.sequence_length
            and content.strategy == data.packing
            and content.stride == data.stride
        ):
            return table
    lengths = ", ".join(str(content.sequence_length) for content in contents.values())
    raise ConfigError(
        f"{dataset} has rows of {lengths} tokens, none of "
        f"data.sequence_length={data.sequence_length} "
        f"made by data.packing={data.packing}; change that."
    )
