"""Two and four ranks that share rows compute what one process does with whole rows: logits, loss and gradients (fp64)."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_ranks_that_share_rows_have_the_gradients_of_one_process(tmp_path):
    program = Path(__file__).parent / "exactness/context.py"
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
    assert len(found) == 54
    assert not {cell: largest for cell, largest in found.items() if not largest < 1e-10}
