"""Prepare data in a process of its own: `python build.py SETTINGS HOME` prints the dataset's reference as JSON.

Variables: RUN_BYTES, the largest part of a text, small by default; ENGINE=gigatoken uses the fast engine for little text as well;
MOST_THREADS, above which workers are processes, by default 1.
"""

import os
import signal
import sys
from pathlib import Path

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess import stage, workers
from infini_llama.tasks.preprocess.tokens import parts

# Not below the guard: workers that are spawned import this file and need the same parts.
parts.RUN_BYTES, parts.PER_FILE = int(os.environ.get("RUN_BYTES", "1500")), 0

if __name__ == "__main__":
    workers.MOST_THREADS = int(os.environ.get("MOST_THREADS", "1"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    stage.WORTH_A_FAST_ENGINE = 1 if os.environ.get("ENGINE") == "gigatoken" else 10**9
    print("started", flush=True)
    print(
        stage.preprocess(
            DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2])
        ).model_dump_json()
    )
