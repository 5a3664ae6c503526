"""Rows computed on a device, in a process of their own."""

import numpy as np
import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.rows.devices import rows_on
from infini_llama.tasks.preprocess.rows.packing import compute_rows

LENGTHS = np.array([100, 20, 1, 7, 10, 11])


@pytest.mark.parametrize("strategy", ["concat", "greedy"])
def test_a_gpu_that_fails_is_refused(monkeypatch, strategy):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with rows_on("cuda:1") as compute, pytest.raises(ConfigError, match=r"data\.device: cuda:1"):
        compute(LENGTHS, strategy, 10, None)


def test_the_process_returns_the_rows():
    with rows_on("cpu:0") as compute:  # which torch takes for the CPU; numpy's is "cpu"
        for strategy, stride in (("concat", None), ("window", 3), ("padded", None), ("greedy", None)):
            found, expected = compute(LENGTHS, strategy, 10, stride), compute_rows(LENGTHS, strategy, 10, stride)
            assert found.device == "cpu" and found.rows.tobytes() == expected.rows.tobytes()
            assert expected.pieces is None or found.pieces.tobytes() == expected.pieces.tobytes()
