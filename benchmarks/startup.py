"""What the command costs around the training itself: `--help`, a finished run again (`--no-prefect` and on the embedded server).

    .venv/bin/python benchmarks/startup.py

Everything runs in a folder of its own; commands are timed as whole processes, in turn, and medians are reported. The raw times,
with machine and versions, go to benchmarks/results/startup.json.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROUNDS = 5
COMMAND = str(Path(sys.executable).with_name("infini-llama"))
SMALL = [
    "train.max_steps=5",
    "train.warmup_steps=1",
    "train.eval_steps=5",
    "train.save_steps=5",
    "train.sample_tokens=8",
]
CASES = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import the stages of --no-prefect": [
        sys.executable,
        "-c",
        "import infini_llama.flows.pipeline",
    ],
    "import prefect": [sys.executable, "-c", "import prefect.flows"],
    "--help": [COMMAND, "--help"],
    "finished run again, --no-prefect": [
        COMMAND,
        "run",
        "configs/tiny.yaml",
        "--no-prefect",
        *SMALL,
    ],
    "finished run again, embedded server": [COMMAND, "run", "configs/tiny.yaml", *SMALL],
}


def seconds(command: list[str], home: str) -> float:
    """Wall time of one process from start to exit."""
    started = time.perf_counter()
    subprocess.run(
        command, env=os.environ | {"INFINI_LLAMA_HOME": home}, check=True, capture_output=True
    )
    return time.perf_counter() - started


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        first = {
            "first run, embedded server, all stages": seconds(
                CASES["finished run again, embedded server"], home
            )
        }
        times: dict[str, list[float]] = {name: [] for name in CASES}
        for _ in range(ROUNDS):
            for name, command in CASES.items():
                times[name].append(seconds(command, home))
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    versions = {name: version(name) for name in ("prefect", "torch", "pydantic")}
    result = {
        "machine": machine,
        "load": os.getloadavg(),
        "versions": versions,
        "once": first,
        "seconds": times,
    }
    target = Path(__file__).with_name("results") / "startup.json"
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, values in times.items():
        print(
            f"{name:<40} median {statistics.median(values):6.2f} s   ({min(values):.2f} – {max(values):.2f})"
        )


if __name__ == "__main__":
    main()
