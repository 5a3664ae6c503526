"""Rows computed on a device, in a process of their own."""

import logging

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.rows import chunking
from infini_llama.tasks.preprocess.rows.chunking import (
    compute_starts,
    row_starts,
)


def test_a_gpu_that_fails_leaves_the_work_to_the_cpu_or_is_refused_if_requested_by_name(caplog, monkeypatch):
    monkeypatch.setattr(chunking, "GPU_ROWS", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with caplog.at_level(logging.WARNING):
        starts, device = compute_starts(99, 10, "cuda:0", required=False)
    assert device == "cpu" and starts.tobytes() == row_starts(99, 10).tobytes()
    assert "cuda:0" in caplog.text
    with pytest.raises(ConfigError, match=r"data\.device: cuda:1"):
        compute_starts(10, 10, "cuda:1", required=True)
