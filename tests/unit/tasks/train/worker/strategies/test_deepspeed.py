"""What stands between this project and DeepSpeed, as far as it is without the package."""

import math
import sys

import pytest
import torch

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.train.worker.strategies.deepspeed import (
    _finite_or_inf,
    load_deepspeed,
)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"infini-llama\[deepspeed\]"):
        load_deepspeed(torch.device("cpu"))


@pytest.mark.parametrize(
    ("reported", "norm"),
    [
        (0.0, 0.0),
        (2.5, 2.5),
        (-1.0, math.inf),
        (math.inf, math.inf),
        (math.nan, math.inf),
    ],
)
def test_the_norm_of_non_finite_gradients_is_inf_for_any_engine_report(reported, norm):
    assert _finite_or_inf(reported) == norm
