"""Runs of random weights, the same ones each time."""

import pytest
import torch

from support.trained_runs import ranks as ranks
from support.trained_runs import run_of as run_of


@pytest.fixture(autouse=True)
def same_weights():
    torch.manual_seed(0)
