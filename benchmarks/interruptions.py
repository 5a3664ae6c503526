"""How long an interrupted run takes: SIGTERM until its checkpoint is committed, and a stopped rank until the run goes on.

    .venv/bin/python benchmarks/interruptions.py [ROUNDS]

The tiny preset on two workers and the system's settings as they come. SIGTERM goes to the command after step 20; the clock runs to the
moment its checkpoint has its name (the folder's rename), and to the end of the command. SIGSTOP goes to rank 1 after step 20; the clock
runs to the attempt's recorded end, which names the rank, and to the first step that the next attempt adds to metrics.jsonl. Beside it
stands what was learned of a step: the longest one of the first attempt. Results go to benchmarks/results/interruptions.json.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "infini_llama", "run", "tiny", "--no-prefect"]
SETTINGS = [
    "environment.nproc_per_node=2",
    "train.max_steps=400",
    "train.eval_steps=400",
]
# The former's only one is the one asked for.
SAVES = {
    "SIGTERM": "train.save_steps=400",
    "SIGSTOP": "train.save_steps=10",
}
AFTER_STEP = 20


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [
        json.loads(line)
        for line in text.splitlines(keepends=True)
        if line.endswith("\n")
    ]


def last_step(run: Path) -> int:
    return max((line["step"] for line in lines(run / "metrics.jsonl")), default=0)


def until(
    true: Callable[[], Any], process: subprocess.Popen, seconds: float = 180
) -> float:
    """Waits for `true`; returns the time at which it was."""
    given_up = time.monotonic() + seconds
    while not true():
        if time.monotonic() > given_up or (process.poll() is not None and not true()):
            process.kill()
            raise SystemExit(
                "the run ended, or did not answer in time; its logs tell why"
            )
        time.sleep(0.01)
    return time.monotonic()


def begun(home: Path, name: str, saves: str) -> tuple[subprocess.Popen, Path]:
    """A run that has reached AFTER_STEP."""
    environment = os.environ | {"INFINI_LLAMA_HOME": str(home)}
    process = subprocess.Popen(
        [*COMMAND, f"runtime.name={name}", *SETTINGS, saves],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = home / "runs" / name
    until(lambda: last_step(run) >= AFTER_STEP, process, 600)
    return process, run


def asked_to_stop(home: Path, name: str) -> dict[str, float]:
    process, run = begun(home, name, SAVES["SIGTERM"])
    at = time.monotonic()
    process.send_signal(signal.SIGTERM)
    committed = until(lambda: any((run / "checkpoints").glob("step-*")), process) - at
    assert process.wait(60) == 75, process.returncode
    return {"committed": committed, "ended": time.monotonic() - at}


def stopped_rank(home: Path, name: str) -> dict[str, float]:
    process, run = begun(home, name, SAVES["SIGSTOP"])
    pid = json.loads(
        (run / "logs/attempt-01/status-1.json").read_text(encoding="utf-8")
    )["pid"]
    os.kill(pid, signal.SIGSTOP)
    at = time.monotonic()
    step = last_step(run)
    named = until(
        lambda: any(
            "rank 1" in line.get("message", "")
            for line in lines(run / "attempts.jsonl")
        ),
        process,
    )
    learned = max(
        line["step_time"]
        for line in lines(run / "metrics.jsonl")
        if "step_time" in line
    )
    continues = until(lambda: last_step(run) > step, process)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    return {"named": named - at, "continues": continues - at, "longest_step": learned}


def main(rounds: int) -> None:
    found: dict[str, list[dict[str, float]]] = {"SIGTERM": [], "SIGSTOP": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            found["SIGTERM"].append(asked_to_stop(Path(folder), f"term-{number}"))
            found["SIGSTOP"].append(stopped_rank(Path(folder), f"stop-{number}"))
            print(
                json.dumps({kind: values[-1] for kind, values in found.items()}),
                flush=True,
            )
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    result = {
        "machine": machine,
        "load": os.getloadavg(),
        "torch": version("torch"),
        "seconds": found,
    }
    target = Path(__file__).with_name("results") / "interruptions.json"
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for kind, values in found.items():
        for what in values[0]:
            seconds = [one[what] for one in values]
            print(
                f"{kind} {what:<13} median {statistics.median(seconds):6.2f} s   ({min(seconds):.2f} – {max(seconds):.2f})"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
