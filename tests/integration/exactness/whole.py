"""Runs the whole cover and stores what came of each cell in benchmarks/results/exactness.json: `make exactness`."""

import json
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from integration.exactness.bench import Bench, interrupted_equals_uninterrupted
from integration.exactness.cover import (
    FACTORS,
    WHOLE,
    name_of,
    pairwise_cover,
    possible,
)

from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment.machine import cpu
from support.preloaded import Server

RESULTS = Path(__file__).parents[3] / "benchmarks/results/exactness.json"


def main() -> int:
    cells = [
        (name_of(cell), cell) for cell in pairwise_cover(FACTORS, possible)
    ] + WHOLE
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="exactness-") as home:
        differing = interrupted_equals_uninterrupted(Bench(Path(home), Server()), cells)
    rows = [
        {"cell": cell, "bitwise": not differing[name], "differing": differing[name]}
        for name, cell in cells
    ]
    machine = {
        "cpu": cpu(Machine()).model,
        "platform": platform.platform(),
        "torch": torch.__version__,
    }
    record = {
        "compared": [
            "weights_sha256",
            "optimizer_sha256",
            "metrics.jsonl but its times",
        ],
        "cells": rows,
    }
    RESULTS.write_text(
        json.dumps(
            record
            | {"machine": machine, "seconds": time.time() - began, "time": began},
            indent=1,
        )
    )
    print(
        f"{sum(row['bitwise'] for row in rows)} of {len(rows)} cells are bitwise equal"
    )
    return 0 if all(row["bitwise"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
