"""Rows computed on a device, in a process of their own."""

import numpy as np
import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.rows.devices import rows_on


@pytest.mark.parametrize("strategy", ["concat", "greedy"])
def test_a_gpu_that_fails_is_refused(monkeypatch, strategy):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with rows_on("cuda:1") as compute, pytest.raises(ConfigError, match=r"data\.device: cuda:1"):
        compute(np.array([100, 20]), strategy, 10, None)
