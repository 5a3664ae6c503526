import json
import resource
import subprocess
import sys
from itertools import pairwise

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.artifacts import check
from tasks.preprocess.arrays import save_array
from tasks.preprocess.reader import map_list
from tasks.preprocess.tokens import ShardWriter, dtype_for, entropy_bits


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    capacity=st.integers(1, 80),
    dtype=st.sampled_from([np.uint16, np.uint32]),
)
def test_shards_joined_are_the_documents_in_order_and_none_is_cut(tmp_path_factory, lengths, capacity, dtype):
    folder = tmp_path_factory.mktemp("shards") / "train"
    documents = [(np.arange(length) * 7 + number).astype(dtype) for number, length in enumerate(lengths)]
    writer = ShardWriter(folder, np.dtype(dtype), capacity)
    for document in documents:
        writer.add(document)
    writer.flush()
    read, first_document, first_token = [], 0, 0
    for shard in writer.shards:
        offsets, values = map_list(folder.parent / shard["file"])
        assert values.dtype == dtype and offsets[0] == 0 and offsets[-1] == len(values)
        read += [values[start:end] for start, end in pairwise(offsets)]
        assert (shard["documents"], shard["tokens"]) == (len(offsets) - 1, len(values))
        assert (shard["first_document"], shard["first_token"]) == (first_document, first_token)
        assert len(values) <= capacity or len(offsets) == 2  # beyond the bound only a single document
        first_document, first_token = first_document + len(offsets) - 1, first_token + len(values)
    assert [document.tolist() for document in read] == [document.tolist() for document in documents]
    assert (writer.documents, writer.tokens) == (len(documents), sum(lengths))


def test_16_bits_hold_a_vocabulary_of_65536_and_not_one_more():
    assert (dtype_for(65_536), dtype_for(65_537)) == (np.uint16, np.uint32)


def test_entropy_is_that_of_the_distribution():
    assert entropy_bits(np.array([5, 5, 0, 5, 5])) == 2.0
    assert entropy_bits(np.array([7])) == 0.0
    assert entropy_bits(np.array([3, 1])) == pytest.approx(0.75 * np.log2(4 / 3) + 0.25 * 2)


def test_datasets_opens_both_splits_and_a_users_map_over_them_does_no_harm(built):
    home, reference = built
    folder = home / reference["path"]
    fingerprints = set()
    for split in ("train", "validation"):
        opened = datasets.load_from_disk(str(folder / split))
        assert isinstance(opened, datasets.Dataset)
        assert opened.features == {"input_ids": datasets.LargeList(datasets.Value("uint16"))}
        assert len(opened) == reference[split]["documents"]
        shards = [map_list(path) for path in sorted((folder / split).glob("data-*.arrow"))]
        ours = [values[start:end].tolist() for offsets, values in shards for start, end in pairwise(offsets)]
        assert list(opened["input_ids"]) == ours
        assert all(ids[-1] == 0 and 0 not in ids[:-1] for ids in opened["input_ids"])
        mapped = opened.map(lambda row: {"length": len(row["input_ids"])})
        assert sum(list(mapped["length"])) == reference[split]["tokens"]
        fingerprints.add(opened._fingerprint)
    assert len(fingerprints) == 2  # `datasets` names its caches by them
    assert list(folder.rglob("cache-*.arrow"))
    check(folder, "dataset", checksums=True)


def test_arrays_are_numpys_own_format(tmp_path):
    for array in (np.arange(7, dtype=np.int64), np.zeros(0, dtype=np.int32), np.arange(10)[::3]):
        save_array(tmp_path / "mine.npy", array)
        np.save(tmp_path / "theirs.npy", array)
        assert (tmp_path / "mine.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()


def test_a_full_disk_is_told_from_other_faults_when_an_array_is_saved(tmp_path):
    script = (
        "import errno, resource, sys, numpy as np; from pathlib import Path; from tasks.preprocess.arrays import save_array\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))\n"
        "try: save_array(Path(sys.argv[1]), np.zeros(1000))\n"
        "except OSError as error: print(error.errno == errno.EFBIG)"
    )
    child = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.npy")], capture_output=True, text=True)
    assert child.stdout == "True\n", child.stderr


def test_the_files_for_datasets_say_nothing_of_this_machine(built):
    home, reference = built
    for split in ("train", "validation"):
        for name in ("state.json", "dataset_info.json"):
            text = (home / reference["path"] / split / name).read_text()
            assert json.loads(text) and str(home) not in text
