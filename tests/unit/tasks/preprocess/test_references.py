"""A dataset named by a person is the one that its configuration would have led to."""

from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.schema import DataConfig
from support.stages import preprocess, reference_for, references


def section(folder: Path, **changes: object) -> dict:
    given = {"files": [f"{folder}/*.txt"], "validation_fraction": 0.3, "tokenizer": {"vocab_size": 300}} | changes
    return DataConfig.model_validate({"sequence_length": 16} | given).model_dump(mode="json")


def test_a_dataset_that_is_named_is_the_one_that_preprocess_returned(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"text number {number}, told again and again. " * 9)
    home = tmp_path / "home"
    first, longer = (preprocess(section(tmp_path, sequence_length=n), str(home)) for n in (16, 32))
    assert first["path"] == longer["path"] and first["chunks"] != longer["chunks"]
    folder = home / first["path"]
    for reference in (first, longer):
        wanted = section(tmp_path, sequence_length=reference["sequence_length"])
        assert reference_for(wanted, folder, home) == reference | {"built": []}
    assert reference_for(section(tmp_path), folder, tmp_path / "elsewhere")["path"] == str(folder)
    with pytest.raises(ConfigError, match=r"rows of 16, 32 tokens|rows of 32, 16 tokens"):
        reference_for(section(tmp_path, sequence_length=64), folder, home)
    damaged = folder / "chunks" / longer["chunks"]
    damaged.rename(f"{damaged}.damaged")
    (reference,) = references(folder, home)  # a table that was moved aside is none
    assert reference["chunks"] == first["chunks"]
    with pytest.raises(DataError, match="was never finished"):
        references(tmp_path, home)
