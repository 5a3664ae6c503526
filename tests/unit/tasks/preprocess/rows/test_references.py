"""A dataset named by a person is the one that its configuration would have led to."""

import pytest

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess.rows.references import (
    reference_for,
    reference_to_all,
)
from infini_llama.tasks.preprocess.stage import preprocess
from support.texts import write_files


def test_a_dataset_that_is_named_is_the_one_that_preprocess_returned(data, tmp_path):
    texts = (
        f"text number {number}, told again and again. " * 9 for number in range(12)
    )
    home, files = tmp_path / "home", [write_files(tmp_path, texts)]
    first, longer = (
        preprocess(data(files=files, sequence_length=n), home) for n in (16, 32)
    )
    assert first.path == longer.path and first.row_table != longer.row_table
    folder = home / first.path
    for reference in (first, longer):
        wanted = data(files=files, sequence_length=reference.sequence_length)
        assert reference_for(wanted, folder, home) == changed(reference, built=[])
    assert reference_for(data(files=files), folder, tmp_path / "elsewhere").path == str(
        folder
    )
    with pytest.raises(
        ConfigError, match=r"rows of 16, 32 tokens|rows of 32, 16 tokens"
    ):
        reference_for(data(files=files, sequence_length=64), folder, home)
    tables = reference_to_all(folder, home).row_tables
    assert {table.row_table for table in tables} == {first.row_table, longer.row_table}
    damaged = folder / "chunks" / longer.row_table
    damaged.rename(f"{damaged}.damaged")
    # A table that was moved aside is none.
    (table,) = reference_to_all(folder, home).row_tables
    assert table.row_table == first.row_table
    with pytest.raises(DataError, match="was never finished"):
        reference_to_all(tmp_path, home)
