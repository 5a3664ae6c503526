"""Which patches a run needs."""

import pytest

from infini_llama.tasks.patch_environment.patches.registry import PATCHES, apply, needed_patches

OLD = {"torch": "2.12.1", "tokenizers": "0.22.0", "flash-attn": "2.8.3"}
NEW = {"torch": "2.13.0+cpu", "tokenizers": "0.23.3"}


def test_a_patch_is_planned_for_the_versions_that_have_its_fault():
    assert {patch.name for patch in needed_patches(OLD)} == {patch.name for patch in PATCHES}
    assert {patch.name for patch in needed_patches(NEW)} == {"rendezvous", "adam-weight-decay"}


def test_each_patch_says_in_a_sentence_what_it_mends_and_where_that_is_described():
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert patch.fault.endswith(".") and patch.reference.startswith("https://")


def test_a_patch_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no patch is called nonsense"):
        apply(["nonsense"])
