"""Ranks that share models have the losses, gradients and norms of one process on the whole batch, under every strategy (fp64)."""

from pathlib import Path

import pytest
from laboratory import found_by_ranks


@pytest.mark.parametrize(("which", "cells"), [("some", 5), pytest.param("all", 45, marks=pytest.mark.slow)])
def test_four_ranks_compute_what_one_does(tmp_path, which, cells):
    target = tmp_path / "found.json"
    found = found_by_ranks(4, target, Path(__file__).parent / "exactness/tensor.py", str(target), which)
    assert found.pop("drifted") == 0, "what several ranks hold has to stay the same on all"
    assert found.pop("survives"), "a checkpoint holds the same tensors in every layout"
    assert len(found) == cells
    limits = {"loss": 1e-6}  # it is summed in fp32
    too_far = {
        cell: values
        for cell, values in found.items()
        if not all(value < limits.get(key, 1e-12) for key, value in values.items())
    }
    assert not too_far
