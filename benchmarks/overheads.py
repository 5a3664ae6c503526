"""What a run spends beside its steps, by the timers inside its first worker: data, metrics and curves, the stall of its saves.

    .venv/bin/infini-llama run configs/tiny.yaml --no-prefect runtime.name=overheads
    .venv/bin/python benchmarks/overheads.py runs/overheads

Shares are of the time from the first step to the last, without evaluations and samples. Results go to
benchmarks/results/overheads.json.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

RESULTS = Path(__file__).with_name("results") / "overheads.json"


def shares(lines: list[dict]) -> dict[str, float]:
    """Of the training lines of a metrics.jsonl; the first step, which waits for much that happens once, is left out."""
    steps = [line for line in lines if line["kind"] == "train"][1:]
    spent = {
        name: sum(step[f"{name}_time"] for step in steps)
        for name in ("step", "data", "report", "save")
    }
    # A step's time has its data in it.
    whole = spent["step"] + spent["report"] + spent["save"]
    return {
        "steps": len(steps),
        "seconds": whole,
        "data": spent["data"] / whole,
        "metrics_and_curves": spent["report"] / whole,
        "stall_of_saves": spent["save"] / whole,
        "data_and_metrics": (spent["data"] + spent["report"]) / whole,
        "metrics_and_saves": (spent["report"] + spent["save"]) / whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    found = shares(
        [
            json.loads(line)
            for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    )
    machine = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
    RESULTS.write_text(
        json.dumps(found | {"machine": machine, "time": time.time()}, indent=1),
        encoding="utf-8",
    )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
