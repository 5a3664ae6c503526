"""Two and four ranks that share rows compute what one process does with whole rows: logits, loss and gradients (fp64)."""

import json
from pathlib import Path

import pytest

from support.laboratory import torchrun


@pytest.mark.parametrize(
    ("which", "cells"), [("some", 8), pytest.param("all", 48, marks=pytest.mark.slow)]
)
def test_context_parallel_has_the_gradients_of_one_process(
    tmp_path, server, which, cells
):
    target = tmp_path / "found.json"
    torchrun(
        server,
        4,
        tmp_path / "log",
        Path(__file__).parent / "exactness/context.py",
        str(target),
        which,
    )
    found = json.loads(target.read_text())
    assert len(found) == cells
    assert not {cell: largest for cell, largest in found.items() if not largest < 1e-10}
