"""Two and four ranks that share rows compute what one process does with whole rows: logits, loss and gradients (fp64)."""

from pathlib import Path

import pytest

from support.laboratory import found_by_ranks


@pytest.mark.parametrize(("which", "cells"), [("some", 9), pytest.param("all", 54, marks=pytest.mark.slow)])
def test_context_parallel_has_the_gradients_of_one_process(tmp_path, which, cells):
    target = tmp_path / "found.json"
    found = found_by_ranks(4, target, Path(__file__).parent / "exactness/context.py", str(target), which)
    assert len(found) == cells
    assert not {cell: largest for cell, largest in found.items() if not largest < 1e-10}
