import logging

import numpy as np
import pytest
from datasets import DatasetDict, load_from_disk

from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.storage.artifacts import check


@pytest.mark.parametrize("strategy", ["concat", "best_fit"])
def test_materialized_rows_are_the_readers_and_datasets_opens_them(data, tmp_path, strategy, digests, caplog):
    section = data(strategy=strategy)
    reference = preprocess(section, str(tmp_path), write_rows=True)
    assert reference["built"] == ["tokens", "chunks", "rows"]
    folder = tmp_path / reference["materialized"]
    check(folder, "rows", checksums=True)
    opened = load_from_disk(str(folder))
    assert isinstance(opened, DatasetDict)
    assert {*opened} == {"train", "validation"}
    for split in ("train", "validation"):
        table = opened[split]
        reader = TokenReader(tmp_path / reference["path"], reference["chunks"], split)
        rows = np.arange(len(reader))
        held = {name: np.array(table[name]) for name in table.column_names}
        assert len(list((folder / split).glob("*.arrow"))) > 1 and len(table) == reference[split]["rows"]
        assert np.array_equal(held["input_ids"], reader.gather(rows))
        kind = table.features["input_ids"]
        assert (kind.length, kind.feature.dtype) == (17, "uint16")
        if strategy == "concat":
            assert table.column_names == ["input_ids"]
            continue
        documents, targets = held["documents"], reader.targets(rows)
        assert targets is not None
        assert np.array_equal(documents[:, :-1], reader.documents(rows))
        assert np.array_equal((documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0), targets)
        assert np.array_equal(held["labels"][:, 1:], np.where(targets, reader.gather(rows)[:, 1:], -100))
        assert (held["labels"][:, 0] == -100).all()

    assert preprocess(section, str(tmp_path), write_rows=True)["built"] == []
    assert "materialized" not in preprocess(section, str(tmp_path))
    before = digests(folder)
    victim = sorted((folder / "train").glob("*.arrow"))[0]
    victim.write_bytes(victim.read_bytes()[:-8])
    with caplog.at_level(logging.WARNING):
        assert preprocess(section, str(tmp_path), write_rows=True)["built"] == ["rows"]
    assert "moved to" in caplog.text and digests(folder) == before
