"""Four ranks, ragged rows, accumulation, rows that ranks share: the gradient of the mean over all targets, weighted or not, whatever the strategy (fp64)."""

import json
from pathlib import Path

from support.laboratory import torchrun


def test_four_ranks_have_the_gradients_of_one_process_on_the_whole_batch(
    tmp_path, server
):
    target = tmp_path / "found.json"
    torchrun(
        server,
        4,
        tmp_path / "log",
        Path(__file__).parent / "exactness/gradients.py",
        str(target),
    )
    found = json.loads(target.read_text())
    assert len(found) == 28
    # The loss is summed in fp32.
    limits = {
        "loss": 1e-6,
        "gradients": 1e-12,
        "norm": 1e-12,
        "clipped": 1e-12,
    }
    too_far = {
        cell: values
        for cell, values in found.items()
        if any(values[key] > limits[key] for key in limits)
    }
    assert not too_far
