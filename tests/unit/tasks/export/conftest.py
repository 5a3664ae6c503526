"""Runs of random weights, and no network."""

import pytest
import torch

from support.trained_runs import ranks as ranks
from support.trained_runs import run_of as run_of


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
