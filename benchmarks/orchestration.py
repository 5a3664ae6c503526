"""What the flow costs around training: `run` on a running server, `run --no-prefect` and bare torchrun, on a dataset that is built.

    .venv/bin/python benchmarks/orchestration.py [--rounds N] [--finished]

Each case is timed as a whole process, from its start to the first line of metrics.jsonl and to its end, in turn and in changing order;
differences are taken within a round. CPU seconds (user and system) are those of the process and all its children, without the
Prefect server. The raw times go to benchmarks/results/orchestration.json, or with --finished, where the run
is a finished one and the baseline is --no-prefect, to orchestration-finished.json. Where two cases train with other losses, it ends
with an error and stores nothing.
"""

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agreement import require_equal

from infini_llama.flows.server import api_for_serve
from infini_llama.tasks.records.metrics import StartTime
from infini_llama.tasks.runs.run_folder import read_attempt_plan, write_attempt_plan

KINDS = ("first_step", "total", "cpu")
Case = Callable[[str], dict[str, Any]]
COMMAND = [sys.executable, "-m", "infini_llama"]
SMALL = [
    "train.max_steps=20",
    "train.warmup_steps=1",
    "train.eval_steps=20",
    "train.save_steps=20",
]
SMALL += [
    "train.sample_tokens=8",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
]


def timed(
    command: list[str], metrics: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """Seconds to the first step on record, and to the end; CPU seconds of the processes."""
    started, first = time.perf_counter(), None
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        while process.poll() is None:
            if first is None and metrics.exists() and metrics.stat().st_size:
                first = time.perf_counter() - started
            time.sleep(0.02)
        total = time.perf_counter() - started
        output.seek(0)
        assert process.returncode == 0 and first is not None, output.read().decode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    times = {"first_step": first, "total": total, "cpu": cpu}
    lines = [
        json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()
    ]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses, f"{metrics} has no loss"
    return times | {"losses": losses}


def bare(
    home: Path, name: str, template: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """torchrun itself, with what a direct run has given its workers."""
    run = home / "runs" / name
    attempt = run / "logs" / "attempt-01"
    attempt.mkdir(parents=True)
    (run / "checkpoints").mkdir()
    given = read_attempt_plan(template)
    started = StartTime(
        wall=time.time(), monotonic=time.monotonic(), machine=given.started.machine
    )
    write_attempt_plan(
        attempt, given.model_copy(update={"run_dir": run, "started": started})
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts=0",
    ]
    command += [
        f"--nproc-per-node={given.plan.nproc_per_node}",
        "--module",
        "infini_llama.tasks.train.worker",
        str(attempt),
    ]
    plan = {key: value for key, value in given.plan.env.items() if value != "***"}
    return timed(command, run / "metrics.jsonl", environment | plan)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def whole(
    home: Path, name: str, environment: dict[str, str], *options: str
) -> dict[str, Any]:
    command = [*COMMAND, "run", "tiny", f"runtime.name={name}", *SMALL, *options]
    return timed(command, home / "runs" / name / "metrics.jsonl", environment)


def main(rounds: int, finished: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        environment = os.environ | {
            "INFINI_LLAMA_HOME": folder,
            "PREFECT_HOME": f"{folder}/prefect",
        }
        environment.pop("PREFECT_API_URL", None)
        os.environ |= {"PREFECT_HOME": f"{folder}/prefect"}
        whole(home, "first", environment, "--no-prefect")
        template = home / "runs/first/logs/attempt-01"
        with api_for_serve(home, "127.0.0.1", free_port()):
            served = environment | {"PREFECT_API_URL": os.environ["PREFECT_API_URL"]}

            def case(environment: dict[str, str], *options: str) -> Case:
                return lambda name: whole(
                    home, "first" if finished else name, environment, *options
                )

            cases: dict[str, Case] = (
                {}
                if finished
                else {"torchrun": lambda name: bare(home, name, template, environment)}
            )
            cases |= {
                "run --no-prefect": case(environment, "--no-prefect"),
                "run": case(served),
            }
            cases["run"]("warm")
            times = rounds_of(cases, rounds)
    report(times, "orchestration-finished" if finished else "orchestration")


def rounds_of(cases: dict[str, Case], rounds: int) -> dict[str, list[dict[str, float]]]:
    """The times of every round.

    Raises:
        SystemExit: two cases have other losses.
    """
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for number in range(rounds):
        for name in list(cases)[:: -1 if number % 2 else 1]:
            times[name].append(
                cases[name](f"r{number}-{name.replace(' ', '-').replace('--', '')}")
            )
        require_equal(
            "the losses", {name: runs[-1].pop("losses") for name, runs in times.items()}
        )
    return times


def report(times: dict[str, list[dict[str, float]]], target: str) -> None:
    """Write the times, and print them with the median differences from the first case in the same round."""
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    versions = {name: version(name) for name in ("prefect", "torch")}
    baseline, *others = times
    over = {
        f"{case} over {baseline}": {
            what: statistics.median(
                a[what] - b[what]
                for a, b in zip(times[case], times[baseline], strict=True)
            )
            for what in KINDS
        }
        for case in others
    }
    result = {
        "machine": machine,
        "load": os.getloadavg(),
        "versions": versions,
        "seconds": times,
        "median": over,
    }
    path = Path(__file__).with_name("results") / f"{target}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for case, values in times.items():
        for what in KINDS:
            seconds = [one[what] for one in values]
            spread = f"({min(seconds):.2f} – {max(seconds):.2f})"
            print(
                f"{case:<26} {what:<11} median {statistics.median(seconds):6.2f} s   {spread}"
            )
    for case, values in over.items():
        print(
            case,
            ", ".join(f"{what} {seconds:+.2f} s" for what, seconds in values.items()),
            "(medians of pairs)",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--finished", action="store_true")
    parsed = parser.parse_args()
    main(parsed.rounds, parsed.finished)
