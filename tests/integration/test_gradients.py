"""Four ranks, ragged rows, accumulation, rows that ranks share: the gradient of the mean over all targets, whatever the strategy (fp64)."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_four_ranks_have_the_gradients_of_one_process_on_the_whole_batch(tmp_path):
    program = Path(__file__).parent / "exactness/gradients.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(program), str(tmp_path / "found.json")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 20
    limits = {"loss": 1e-6, "gradients": 1e-12, "norm": 1e-12, "clipped": 1e-12}  # the loss is summed in fp32
    too_far = {cell: values for cell, values in found.items() if any(values[key] > limits[key] for key in limits)}
    assert not too_far
