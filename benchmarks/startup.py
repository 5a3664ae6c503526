"""What the command costs around the training itself: `--help`, a finished run again (`--no-prefect` and on the embedded server).

Also a new run of 20 tiny steps on a dataset that is built, with `--no-prefect`: seconds to the line of its first step, and from its
last checkpoint to its end; beside it, the same of torchrun, torch and DDP alone (startup_torch.py). And what is imported before a text is
prepared, and by a worker before it trains.

    .venv/bin/python benchmarks/startup.py

Everything runs in a folder of its own; commands are timed as whole processes, in turn, and medians are reported. The bytecode of
the package is written first, as pip does at an installation: PYTHONDONTWRITEBYTECODE would have every process compile it. The raw times,
with machine and versions, go to benchmarks/results/startup.json.
"""

import compileall
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

import infini_llama

ROUNDS = 5
COMMAND = str(Path(sys.executable).with_name("infini-llama"))
SMALL = [
    "train.max_steps=5",
    "train.warmup_steps=1",
    "train.eval_steps=5",
    "train.save_steps=5",
    "train.sample_tokens=8",
]
TRAINING = [
    "train.max_steps=20",
    "train.warmup_steps=1",
    "train.eval_steps=20",
    "train.save_steps=20",
    "train.sample_tokens=8",
]
CASES = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import the preparation": [
        sys.executable,
        "-c",
        "import infini_llama.tasks.preprocess.stage",
    ],
    "import the preparation and awkward, which gigatoken needs": [
        sys.executable,
        "-c",
        "import infini_llama.tasks.preprocess.stage, gigatoken, awkward",
    ],
    "import torch": [sys.executable, "-c", "import torch"],
    "import torch, as torchrun does": [
        sys.executable,
        "-c",
        "import torch.distributed.run",
    ],
    "import torch, as DDP does": [sys.executable, "-c", "import torch._dynamo"],
    "import matplotlib, as the report does": [
        sys.executable,
        "-c",
        "import matplotlib.figure, matplotlib.backends.backend_svg",
    ],
    "import what a worker needs": [
        sys.executable,
        "-c",
        "import infini_llama.tasks.train.worker.rank",
    ],
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
    "finished run again, embedded server": [
        COMMAND,
        "run",
        "configs/tiny.yaml",
        *SMALL,
    ],
}


def seconds(command: list[str], home: str) -> float:
    """Wall time of one process from start to exit."""
    started = time.perf_counter()
    subprocess.run(
        command,
        env=os.environ | {"INFINI_LLAMA_HOME": home},
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - started


def watched(command: list[str], home: str, files: list[Path]) -> list[float]:
    """Seconds from the start of a process until each file has bytes, and until the process ends."""
    seen = dict.fromkeys(files, 0.0)
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=os.environ | {"INFINI_LLAMA_HOME": home},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None:
        for path, when in seen.items():
            if not when and path.exists() and path.stat().st_size:
                seen[path] = time.perf_counter() - started
        time.sleep(0.01)
    ended = time.perf_counter() - started
    if process.returncode or not all(seen.values()):
        raise SystemExit(
            f"{command} ended with {process.returncode}; nothing is stored."
        )
    return [*seen.values(), ended]


def training(home: str, number: int) -> dict[str, float]:
    """Seconds to the first step, and from the last checkpoint to the end, of a run and of torch."""
    run = Path(home) / "runs" / f"startup-{number}"
    command = [COMMAND, "run", "configs/tiny.yaml", "--no-prefect", *TRAINING]
    files = [run / "metrics.jsonl", run / "checkpoints" / "step-00000020"]
    first, last, ended = watched([*command, f"runtime.name={run.name}"], home, files)
    bare_step = Path(home) / f"step-{number}"
    script = str(Path(__file__).with_name("startup_torch.py"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    bare = watched(
        [*torchrun, "--nproc-per-node=2", script, str(bare_step)], home, [bare_step]
    )
    return {
        "new run, to its first step": first,
        "new run, from its last checkpoint to its end": ended - last,
        "torchrun and DDP alone, to a step": bare[0],
        "torchrun and DDP alone, from the step to the end": bare[1] - bare[0],
    }


def main() -> None:
    for folder in ("configs", "flows", "model", "tasks"):
        compileall.compile_dir(Path(infini_llama.__file__).parent / folder, quiet=1)
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
        for number in range(ROUNDS):
            for name, value in training(home, number).items():
                times.setdefault(name, []).append(value)
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
