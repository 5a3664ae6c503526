"""References to a dataset that is named by its folder, as `preprocess` would return them."""

from pathlib import Path

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.rows.tables import dataset_ref, table_ref, with_curriculum
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.storage.artifacts import read_manifest, read_row_table, row_tables


def references(dataset: Path, home: Path) -> list[DatasetRef]:
    """A reference for each row table of the dataset in this folder.

    Raises:
        DataError: no dataset is there, or it has no row table.
    """
    read_manifest(dataset, "dataset")
    tables = row_tables(dataset)
    if not tables:
        raise DataError(f"{dataset} has no row table; run 'infini-llama preprocess' with its configuration again.")
    return [dataset_ref(dataset, table, home, built=[], curriculum=[]) for table in tables]


def reference_for(data: DataConfig, dataset: Path, home: Path) -> DatasetRef:
    """The reference whose rows are those that the section `data` requests, with the row tables of its curriculum.

    Raises:
        ConfigError: the dataset has no such rows.
        DataError: no dataset is there, or it has no row table.
    """
    available = references(dataset, home)
    reference, *stages = [_with_rows(section, available, dataset) for section in with_curriculum(data)]
    curriculum = tuple(table_ref(dataset / "chunks" / stage.chunks) for stage in stages)
    return changed(reference, curriculum=curriculum)


def _with_rows(data: DataConfig, available: list[DatasetRef], dataset: Path) -> DatasetRef:
    for reference in available:
        content = read_row_table(dataset / "chunks" / reference.chunks).content
        requested = (data.sequence_length, data.packing, data.stride)
        if (content.sequence_length, content.strategy, content.stride) == requested:
            return reference
    lengths = ", ".join(str(reference.sequence_length) for reference in available)
    raise ConfigError(
        f"{dataset} has rows of {lengths} tokens, none of data.sequence_length={data.sequence_length} "
        f"made by data.packing={data.packing}; change that."
    )
