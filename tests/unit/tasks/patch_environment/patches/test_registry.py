"""Which patches a run needs, and which have outlived their fault."""

from dataclasses import replace

import pytest
from packaging.specifiers import SpecifierSet

from infini_llama.tasks.patch_environment.patches.registry import PATCHES, apply, needed, removable

OLD = {"torch": "2.12.1", "tokenizers": "0.22.0", "flash-attn": "2.8.3"}
NEW = {"torch": "2.13.0+cpu", "tokenizers": "0.23.3"}


def test_a_patch_is_planned_for_the_versions_that_have_its_fault():
    assert {patch.name for patch in needed({}, {"versions": OLD})} == {patch.name for patch in PATCHES}
    assert {patch.name for patch in needed({}, {"versions": NEW})} == {"rendezvous", "adam-weight-decay"}


def test_each_patch_says_in_a_sentence_what_it_mends_and_where_that_is_described():
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert patch.fault.endswith(".") and patch.reference.startswith("https://")


def test_no_patch_of_ours_has_outlived_its_fault():
    assert not removable()


@pytest.mark.parametrize(
    ("faulty", "allowed", "outlived"),
    [
        ("<2.13", ">=2.11,<2.15", False),
        ("<2.13", ">=2.13,<2.15", True),
        ("<2.13", ">=2.12.9,<2.15", False),
        ("", ">=2.13", False),
        ("==2.12.*", ">=2.13", True),
    ],
)
def test_a_patch_whose_versions_cannot_be_installed_any_more_is_removable(faulty, allowed, outlived):
    patch = replace(PATCHES[0], package="torch", versions=faulty)
    assert bool(removable((patch,), {"torch": SpecifierSet(allowed)})) == outlived


def test_a_patch_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no patch is called nonsense"):
        apply(["nonsense"])
