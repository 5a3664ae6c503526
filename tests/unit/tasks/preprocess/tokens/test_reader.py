from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess.rows.packing import compute_rows
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import (
    map_shard,
    save_array,
    write_shard,
)
from infini_llama.tasks.storage.artifacts import commit, staging
from support.damage import flip


def write_dataset(dataset, documents, capacity, length) -> None:
    staged = staging(dataset)
    (staged / "train").mkdir()
    shards, tokens, pending = [], 0, list(documents)
    while pending:
        taken = [pending.pop(0)]
        while pending and sum(map(len, taken)) + len(pending[0]) <= capacity:
            taken.append(pending.pop(0))
        file = f"train/data-{len(shards):05d}.arrow"
        write_shard(
            staged / file, np.concatenate(taken), [len(document) for document in taken]
        )
        counts = {"documents": len(taken), "tokens": sum(map(len, taken))}
        shards.append(
            {"file": file, **counts, "first_document": 0, "first_token": tokens}
        )
        tokens += counts["tokens"]
    extremes = {
        "shortest_document": 1,
        "longest_document": tokens,
        "unigram_entropy_bits": 1.0,
    }
    split = {
        "documents": len(documents),
        "tokens": tokens,
        "bytes": tokens,
        "shards": shards,
    } | extremes
    facts = {
        "vocab_size": 65_536,
        "dtype": "uint16",
        "eos_id": 0,
        "text_yields_special_tokens": False,
    }
    commit(
        staged, dataset, "dataset", {}, facts | {"train": split, "validation": split}
    )
    staged = staging(dataset / "chunks" / "k")
    save_array(
        staged / "train.rows.npy",
        compute_rows(np.array([tokens]), "concat", length).entries,
    )
    table = {
        "strategy": "concat",
        "sequence_length": length,
        "rows": {"train": 0, "validation": 0},
    }
    commit(staged, dataset / "chunks" / "k", "chunks", {}, table)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    capacity=st.integers(1, 40),
    length=st.integers(2, 70),
    verify_on_read=st.booleans(),
    data=st.data(),
)
def test_rows_are_those_of_the_documents_literally_joined(
    tmp_path_factory, lengths, capacity, length, verify_on_read, data
):
    dataset = tmp_path_factory.mktemp("reader") / "data"
    stream = np.arange(1, sum(lengths) + 1, dtype=np.uint16) * np.uint16(13)
    write_dataset(dataset, np.split(stream, np.cumsum(lengths)[:-1]), capacity, length)
    reader = TokenReader(dataset, "k", "train", verify_on_read)
    assert len(reader) == (len(stream) - 1) // length
    rows = data.draw(st.lists(st.integers(0, len(reader) - 1))) if len(reader) else []
    gathered = reader.gather(np.array(rows, dtype=np.int64))
    assert gathered.dtype == np.int64 and gathered.shape == (len(rows), length + 1)
    assert gathered.tolist() == [
        stream[row * length : row * length + length + 1].tolist() for row in rows
    ]
    assert (
        reader.most_documents()
        == reader.documents(np.arange(len(reader))).max(initial=0) + 1
    )
    document = np.repeat(np.arange(len(lengths)), lengths)
    found = reader.documents(np.array(rows, dtype=np.int64))
    assert found.dtype == np.int32 and found.shape == (len(rows), length)
    for row, numbers in zip(rows, found, strict=True):
        expected = document[row * length : row * length + length]
        assert numbers.tolist() == (expected - expected[0]).tolist()


def test_a_missing_row_is_an_error(tmp_path):
    write_dataset(tmp_path / "data", [np.arange(100, dtype=np.uint16)], 10, 9)
    reader = TokenReader(tmp_path / "data", "k", "train")
    with pytest.raises(IndexError):
        reader.gather(np.array([len(reader)]))


@pytest.fixture
def open_reader(dataset, row_table) -> Callable[..., TokenReader]:
    """open_reader(split, verify_on_read): a reader of the built dataset."""
    return partial(TokenReader, dataset, row_table.name)


def test_verify_on_read_checks_a_shard_before_its_first_row(open_reader):
    reader = open_reader("train", verify_on_read=True)
    assert len(reader.stream.paths) > 2
    flip(reader.stream.paths[-1])
    reader.gather(np.array([0]))
    with pytest.raises(DataError, match=str(reader.stream.paths[-1])):
        reader.gather(np.array([len(reader) - 1]))


def test_verify_on_read_finds_a_changed_offset_before_it_is_used(open_reader):
    reader = open_reader("train", verify_on_read=True)
    documents = np.concatenate(
        [np.diff(map_shard(path)[0]) for path in reader.stream.paths]
    )
    assert np.array_equal(np.diff(reader.stream.document_offsets()), documents)
    path = reader.stream.paths[-1]
    offsets, _ = map_shard(path)
    # The second document begins a token away.
    flip(path, 8 * (path.read_bytes().index(offsets.tobytes()) + 8))
    reader = open_reader("train", verify_on_read=True)
    with pytest.raises(DataError, match=str(path)):
        reader.stream.document_offsets()


def test_verify_on_read_finds_a_changed_row_table_at_once(open_reader, row_table):
    flip(row_table / "validation.rows.npy", -64)
    open_reader("train", verify_on_read=True)
    with pytest.raises(DataError, match=r"validation\.rows\.npy"):
        open_reader("validation", verify_on_read=True)


@pytest.mark.parametrize("header", [b"{", b"\"'", b"{1", b"\xff"])
def test_a_row_table_whose_header_is_damaged_is_a_sentence(
    open_reader, row_table, header
):
    file = row_table / "train.rows.npy"
    data = file.read_bytes()
    file.write_bytes(
        data[:10] + header + data[10 + len(header) : 118] + b"(" + data[119:]
    )
    with pytest.raises(DataError, match=str(file)):
        open_reader("train")


@pytest.mark.parametrize("left", [0, 10, 200, -1, -700])
@pytest.mark.parametrize("verify_on_read", [False, True])
def test_a_shard_cut_short_is_refused(open_reader, left, verify_on_read):
    shard = open_reader("train").stream.paths[0]
    shard.write_bytes(shard.read_bytes()[:left])
    reader = open_reader("train", verify_on_read)
    if left == -1 and not verify_on_read:
        reader.gather(np.array([0]))  # the end-of-stream mark holds no token
        return
    with pytest.raises(DataError, match=str(shard)):
        reader.gather(np.array([0]))


def test_a_missing_file_is_a_sentence(open_reader, dataset, row_table):
    reader = open_reader("train")
    reader.stream.paths[0].unlink()
    with pytest.raises(DataError, match=str(reader.stream.paths[0])):
        reader.gather(np.array([0]))
    (row_table / "train.rows.npy").unlink()
    with pytest.raises(DataError, match=r"train\.rows\.npy"):
        open_reader("train")
    with pytest.raises(DataError, match=r"manifest\.json"):
        TokenReader(dataset, "other", "train")


def test_a_shard_of_another_type_of_tokens_is_refused(tmp_path):
    # The manifest says uint16.
    write_dataset(tmp_path / "data", [np.arange(100, dtype=np.uint32)], 200, 9)
    with pytest.raises(DataError, match=r"data-00000\.arrow .*uint32.*uint16"):
        TokenReader(tmp_path / "data", "k", "train").gather(np.array([0]))
