import numpy as np
import pytest

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.corpus import OfSource, tokens_key
from infini_llama.tasks.preprocess.learning import learned_key
from infini_llama.tasks.preprocess.rows.tables import row_table_key
from infini_llama.tasks.preprocess.sources.held_out import is_held_out
from infini_llama.tasks.preprocess.tokens.parts import Documents

TEXTS = [OfSource("", ["aa", "bb"], ["cc"])]


def data(**given: object) -> DataConfig:
    return DataConfig.model_validate({"files": ["/x/*"]} | given)


DATA = data()


@pytest.mark.parametrize(
    "change",
    [
        {"deduplicate": True},
        {"tokenizer": {"vocab_size": 4097}},
        {"tokenizer": {"kind": "unigram"}},
        {"tokenizer": {"special_tokens": ["<x>"]}},
    ],
)
def test_settings_that_determine_the_tokens_are_in_the_key(change):
    assert tokens_key(data(**change), TEXTS) != tokens_key(DATA, TEXTS)


@pytest.mark.parametrize(
    "texts",
    [
        [OfSource("", ["aa"], ["cc"])],
        [OfSource("", ["bb", "aa"], ["cc"])],
        [OfSource("", ["aa", "bb"], [])],
        [OfSource("", ["aa", "bb", "cc"], [])],
        [OfSource("x", ["aa", "bb"], ["cc"])],
        [OfSource("", ["aa"], []), OfSource("", ["bb"], ["cc"])],
    ],
)
def test_every_unit_its_place_and_its_source_are_in_the_key(texts):
    assert tokens_key(DATA, texts) != tokens_key(DATA, TEXTS)


def test_a_units_name_is_that_of_its_documents_held_out_share_and_targets():
    names = [
        Documents([b"ab", b"c"], [], 0.1).name,
        Documents([b"a", b"bc"], [], 0.1).name,
        Documents([b"abc"], [], 0.1).name,
        Documents([b"c", b"ab"], [], 0.1).name,
        Documents([b"ab", b"c"], [], 0.2).name,
        Documents([b"ab", b"c"], [], 0.1, [[(1, 2)], [(0, 1)]]).name,
        Documents([b"ab", b"c"], [], 0.1, [[(0, 2)], [(0, 1)]]).name,
        Documents([b"ab", b"c"], [], 0.1, [[(0, 1)], [(2, 3), (4, 5)]]).name,
        Documents([b"ab", b"c"], [], 0.1, [[(0, 1), (2, 3)], [(4, 5)]]).name,
    ]
    assert len(set(names)) == 9 and {len(name) for name in names} == {32}
    assert Documents([b"ab", b"c"], [], 0.1).name == names[0]


def test_a_learned_tokenizer_depends_on_its_settings_and_text():
    key = learned_key(DATA, TEXTS)
    assert (
        learned_key(data(packing="padded"), TEXTS)
        == key
        != learned_key(data(tokenizer={"vocab_size": 300}), TEXTS)
    )
    assert learned_key(DATA, [OfSource("", ["aa"], ["cc"])]) != key


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_length": 8},
        {"device": "cpu"},
        {"engine": "ray"},
        {"files": ["./*"]},
        {"packing": "padded"},
    ],
)
def test_settings_that_do_not_determine_the_tokens_are_not_in_the_key(change):
    assert tokens_key(data(**change), TEXTS) == tokens_key(DATA, TEXTS)


def test_the_rows_key_follows_tokens_length_and_strategy_and_no_device():
    key = row_table_key(DATA, "t" * 64)
    assert len(key) == len(tokens_key(DATA, TEXTS)) == 64
    assert row_table_key(data(device="cpu"), "t" * 64) == key
    changed = [
        row_table_key(DATA, "u" * 64),
        *(
            row_table_key(data(**c), "t" * 64)
            for c in ({"sequence_length": 8}, {"packing": "padded"})
        ),
    ]
    assert key not in changed and len(set(changed)) == 3


def test_a_larger_share_holds_out_the_same_documents_and_more():
    hashes = np.zeros((1024, 16), dtype=np.uint8)
    hashes[:, :8] = (
        (np.arange(1024, dtype=np.uint64) << np.uint64(54))
        .astype(">u8")[:, None]
        .view(np.uint8)
    )
    shares = {
        share: set(np.flatnonzero(is_held_out(hashes, share)))
        for share in (0.0, 0.01, 0.25, 0.5, 1.0)
    }
    assert [len(units) for units in shares.values()] == [0, 11, 256, 512, 1024]
    assert shares[0.01] < shares[0.25] < shares[0.5]
