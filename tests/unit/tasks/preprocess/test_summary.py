import json
import shutil

import pytest

from infini_llama.tasks.storage.artifacts import Damaged, move_aside
from support.stages import describe, preprocess


def test_counts_lengths_tables_and_text_are_shown(built, data):
    home, reference = built
    preprocess(data(sequence_length=20), str(home))
    found = describe(home / reference["path"])
    assert json.loads(json.dumps(found)) == found
    for split in ("train", "validation"):
        shown, lengths = found["splits"][split], found["splits"][split]["document_tokens"]
        assert (shown["documents"], shown["tokens"]) == (reference[split]["documents"], reference[split]["tokens"])
        assert 1 < lengths["shortest"] <= lengths["p5"] <= lengths["median"] <= lengths["p95"] <= lengths["longest"]
        assert shown["bytes_per_token"] == pytest.approx(shown["bytes"] / shown["tokens"])
    assert sorted(table["sequence_length"] for table in found["chunks"].values()) == [16, 20]
    assert len(found["samples"]) == 3 and all(found["samples"])
    assert (found["license"], found["vocab_size"], found["dtype"]) == ("not stated", 300, "uint16")


def test_samples_are_rows_as_text(built, corpus):
    home, reference = built
    texts = "<|endoftext|>".join(path.read_text(encoding="utf-8") for path in sorted(corpus.glob("*.txt")))
    first = describe(home / reference["path"])["samples"][0]
    assert len(first) > 5 and first in texts


def test_tables_set_aside_or_unfinished_are_not_listed_and_a_broken_dataset_is_refused(built, data):
    home, reference = built
    folder = home / reference["path"]
    other = preprocess(data(sequence_length=20), str(home))["chunks"]
    (folder / "chunks" / other / "train.rows.npy").unlink()
    move_aside(folder / "chunks" / other)
    shutil.copytree(folder / "chunks" / reference["chunks"], folder / "chunks" / f".{other}.1-ab.tmp")
    assert list(describe(folder)["chunks"]) == [reference["chunks"]]
    (folder / "manifest.json").unlink()
    with pytest.raises(Damaged, match="manifest"):
        describe(folder)
