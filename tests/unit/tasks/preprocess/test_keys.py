from dataclasses import replace
from pathlib import Path

import pytest

from tasks.preprocess.keys import chunks_key, is_validation, tokens_key
from tasks.preprocess.sources import Document

DOCUMENTS = [Document(Path("/x/a"), "a", 3, "aa" * 32), Document(Path("/x/b"), "b", 4, "bb" * 32)]
DATA = {
    "source": "files",
    "files": ["/x/*"],
    "validation_fraction": 0.05,
    "sequence_length": 256,
    "strategy": "concat",
    "tokenizer": {"vocab_size": 4096, "min_frequency": 2},
    "shard_size": 1024,
    "device": "auto",
}


@pytest.mark.parametrize(
    "change",
    [
        {"validation_fraction": 0.1},
        {"tokenizer": {"vocab_size": 4097, "min_frequency": 2}},
        {"tokenizer": {"vocab_size": 4096, "min_frequency": 3}},
        {"shard_size": 2048},
    ],
)
def test_what_decides_the_tokens_is_in_their_key(change):
    assert tokens_key(DATA | change, DOCUMENTS) != tokens_key(DATA, DOCUMENTS)


@pytest.mark.parametrize("change", [{"name": "c"}, {"size": 5}, {"hash": "cc" * 32}])
def test_every_document_is_in_the_key_and_its_place_is_not(change):
    key = tokens_key(DATA, DOCUMENTS)
    assert tokens_key(DATA, [DOCUMENTS[0], replace(DOCUMENTS[1], **change)]) != key
    assert tokens_key(DATA, DOCUMENTS[:1]) != key
    assert tokens_key(DATA, [replace(DOCUMENTS[0], path=Path("/elsewhere/a")), DOCUMENTS[1]]) == key


@pytest.mark.parametrize(
    "change", [{"sequence_length": 8}, {"device": "cpu"}, {"files": ["./*"]}, {"strategy": "other"}]
)
def test_what_does_not_decide_the_tokens_is_not_in_their_key(change):
    assert tokens_key(DATA | change, DOCUMENTS) == tokens_key(DATA, DOCUMENTS)


def test_the_rows_key_follows_tokens_length_and_strategy_and_no_device():
    key = chunks_key(DATA, "t" * 64)
    assert len(key) == len(tokens_key(DATA, DOCUMENTS)) == 64
    assert chunks_key(DATA | {"device": "cpu"}, "t" * 64) == key
    changed = [
        chunks_key(DATA, "u" * 64),
        *(chunks_key(DATA | c, "t" * 64) for c in ({"sequence_length": 8}, {"strategy": "x"})),
    ]
    assert key not in changed and len(set(changed)) == 3


def test_held_out_documents_are_the_wanted_share_and_more_share_keeps_them():
    documents = [Document(Path("x"), "x", 1, f"{number * 2**54:016x}" + "0" * 48) for number in range(1024)]
    shares = {share: {d.hash for d in documents if is_validation(d, share)} for share in (0.01, 0.25, 0.5)}
    assert [len(held) for held in shares.values()] == [11, 256, 512]
    assert shares[0.01] < shares[0.25] < shares[0.5]
