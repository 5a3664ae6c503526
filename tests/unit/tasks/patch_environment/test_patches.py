"""Which patches a run needs, and what they say."""

import pytest

from infini_llama.tasks.patch_environment.patches.flash_faults import explain
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
    with pytest.raises(ValueError, match="nonsense"):
        apply(["nonsense"])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("libcudart.so.11.0: cannot open shared object file", "built for CUDA 11.0"),
        ("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda", "another torch"),
        ("version `GLIBCXX_3.4.32' not found", "newer C++ library"),
        ("version `GLIBC_2.38' not found", "glibc 2.38"),
        ("something\n  else", "something else"),
    ],
)
def test_each_known_fault_has_its_words(message, words):
    assert words in explain(message) and "\n" not in explain(message)


def test_where_the_fault_is_gone_the_patch_is_not_planned():
    """Compiled code of another number of threads, which torch had up to 2.12."""
    for number, planned in (("2.12.1", True), ("2.13.0+cpu", False)):
        assert ("inductor-threads" in [patch.name for patch in needed_patches({"torch": number})]) == planned
