"""Rows computed on a device, in a process of their own."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.rows.chunking import compute_starts


def test_a_gpu_that_fails_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"data\.device: cuda:1"):
        compute_starts(10, 10, "cuda:1")
