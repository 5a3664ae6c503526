"""Without the package a run under DeepSpeed ends with the sentence that names it."""

import sys

import pytest
import torch

from configs.errors import ConfigError
from tasks.train.worker.zero import load_deepspeed


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"infini-llama\[deepspeed\]"):
        load_deepspeed(torch.device("cpu"))
