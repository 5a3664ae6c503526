import numpy as np
import pytest

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.sources.survey import is_validation
from infini_llama.tasks.preprocess.tokens.keys import chunks_key, tokens_key

DOCUMENTS = {"documents": [["a", 3, "aa" * 32], ["b", 4, "bb" * 32]]}


def data(**given: object) -> DataConfig:
    return DataConfig.model_validate({"files": ["/x/*"], "shard_size": 1024} | given)


DATA = data()


@pytest.mark.parametrize(
    "change",
    [
        {"validation_fraction": 0.1},
        {"tokenizer": {"vocab_size": 4097}},
        {"tokenizer": {"min_frequency": 3}},
        {"tokenizer": {"kind": "unigram"}},
        {"tokenizer": {"special_tokens": ["<x>"]}},
        {"shard_size": 2048},
    ],
)
def test_settings_that_determine_the_tokens_are_in_the_key(change):
    assert tokens_key(data(**change), DOCUMENTS) != tokens_key(DATA, DOCUMENTS)


@pytest.mark.parametrize("change", [["c", 3, "aa" * 32], ["a", 5, "aa" * 32], ["a", 3, "cc" * 32]])
def test_every_document_is_in_the_key(change):
    key = tokens_key(DATA, DOCUMENTS)
    assert tokens_key(DATA, {"documents": [change, DOCUMENTS["documents"][1]]}) != key
    assert tokens_key(DATA, {"documents": DOCUMENTS["documents"][:1]}) != key
    assert tokens_key(DATA, DOCUMENTS | {"validation_documents": [change]}) != key


def test_the_layout_of_several_shards_is_in_the_key_and_their_number_is_not():
    assert tokens_key(DATA, DOCUMENTS, 2) == tokens_key(DATA, DOCUMENTS, 3) != tokens_key(DATA, DOCUMENTS)


@pytest.mark.parametrize(
    "change", [{"sequence_length": 8}, {"device": "cpu"}, {"files": ["./*"]}, {"packing": "padded"}]
)
def test_settings_that_do_not_determine_the_tokens_are_not_in_the_key(change):
    assert tokens_key(data(**change), DOCUMENTS) == tokens_key(DATA, DOCUMENTS)


def test_the_rows_key_follows_tokens_length_and_strategy_and_no_device():
    key = chunks_key(DATA, "t" * 64)
    assert len(key) == len(tokens_key(DATA, DOCUMENTS)) == 64
    assert chunks_key(data(device="cpu"), "t" * 64) == key
    changed = [
        chunks_key(DATA, "u" * 64),
        *(chunks_key(data(**c), "t" * 64) for c in ({"sequence_length": 8}, {"packing": "padded"})),
    ]
    assert key not in changed and len(set(changed)) == 3


def test_held_out_documents_are_the_wanted_share_and_more_share_keeps_them():
    hashes = np.zeros((1024, 32), dtype=np.uint8)
    hashes[:, :8] = (np.arange(1024, dtype=np.uint64) << np.uint64(54)).astype(">u8")[:, None].view(np.uint8)
    shares = {share: set(np.flatnonzero(is_validation(hashes, share))) for share in (0.01, 0.25, 0.5)}
    assert [len(units) for units in shares.values()] == [11, 256, 512]
    assert shares[0.01] < shares[0.25] < shares[0.5]
