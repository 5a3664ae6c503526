"""Rows and masks that CUDA computes have the bytes of the CPU's."""

import numpy as np
import pytest

from infini_llama.tasks.preprocess.rows.packing import PACKED, compute_rows
from infini_llama.tasks.preprocess.rows.tables import ON_A_GPU, resolve_device, rows_on

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ["concat", "window", *PACKED])
def test_rows(strategy):
    lengths = np.clip(np.random.default_rng(7).lognormal(6.6, 1.5, 300_000), 1, 200_000).astype(np.int64)
    stride = 500 if strategy == "window" else None
    device = resolve_device("cuda:0", strategy)
    expected = compute_rows(lengths, strategy, 2048, stride)
    with rows_on(device) as compute:
        found = compute(lengths, strategy, 2048, stride)
    assert device == ("cuda:0" if strategy in ON_A_GPU else "cpu")
    assert found.rows.tobytes() == expected.rows.tobytes()
    assert expected.pieces is None or found.pieces.tobytes() == expected.pieces.tobytes()
