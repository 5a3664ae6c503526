"""Shards on a full disk."""

import resource
import subprocess
import sys


def test_a_full_disk_is_distinguished_from_other_errors_on_save(tmp_path):
    script = (
        "import errno, resource, sys, numpy as np; from pathlib import Path\n"
        "from infini_llama.tasks.preprocess.tokens.shards import save_array\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))\n"
        "try: save_array(Path(sys.argv[1]), np.zeros(1000))\n"
        "except OSError as error: print(error.errno == errno.EFBIG)"
    )
    child = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.npy")], capture_output=True, text=True)
    assert child.stdout == "True\n", child.stderr
