"""Random faults against real runs: `make faults N=100 SEED=1` injects N of them and prints what came of each.

Each fault strikes a run of its own at a moment drawn from the seed; then the same command runs again, as a user would do, until
it ends well, and the result is compared with the run that nobody disturbed. Parts add up: results are appended, with machine and
versions, to benchmarks/results/faults.jsonl.
"""

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.laboratory import CONFIG, Laboratory, Started, exact_metrics, inject

RESULTS = Path(__file__).parents[3] / "benchmarks/results/faults.jsonl"
WORKERS = 2

RAISE = """
def change(module):
    step, calls = module.train_step, []
    def failing(*arguments):
        calls.append(1)
        if len(calls) == AT and os.environ["RANK"] == "1" and once():
            END
        return step(*arguments)
    module.train_step = failing
"""
RENAME = """
def change(module):
    import pathlib, signal
    rename = pathlib.Path.rename
    def dying(self, target):
        if "step-" in self.name and self.name.endswith(".tmp") and calls.append(1) is None and len(calls) == AT and once():
            BEFORE
            rename(self, target)
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)
    calls = []
    pathlib.Path.rename = dying
"""


class Trial:
    """One run under one fault."""

    def __init__(self, lab: Laboratory, name: str, attention: str, rng: random.Random) -> None:
        self.lab, self.name, self.rng = lab, name, rng
        self.at = rng.randint(3, 50)
        self.direct = True
        self.overrides = [
            f"model.attention={attention}",
            f"environment.nproc_per_node={WORKERS}",
            "runtime.hang_after=4",
        ]
        self.largest_file: int | None = None

    def start(self) -> Started:
        return self.lab.start(self.name, *self.overrides, direct=self.direct, largest_file=self.largest_file)

    def pids(self, started: Started, mark: str, without: str = "\0") -> list[int]:
        return sorted(pid for pid, command in started.processes().items() if mark in command and without not in command)

    def worker(self, started: Started) -> int:
        return self.rng.choice(self.pids(started, "infini_llama.tasks.train.worker", "torch.distributed.run"))

    def torchrun(self, started: Started) -> int:
        return self.pids(started, "torch.distributed.run")[0]

    def reach(self, started: Started) -> None:
        self.lab.wait_for_step(self.name, self.at, started)
        time.sleep(self.rng.uniform(0, 0.05))


def signalled(number: signal.Signals, victim: Callable[[Trial, Started], int]) -> Callable[[Trial], Started]:
    def strike(trial: Trial) -> Started:
        started = trial.start()
        trial.reach(started)
        os.kill(victim(trial, started), number)
        return started

    return strike


def during_save(trial: Trial) -> Started:
    """Everything at once, while a checkpoint is being written."""
    started = trial.start()
    trial.at = min(trial.at, 45)
    trial.reach(started)
    while not any((trial.lab.run_dir(trial.name) / "checkpoints").glob(".step-*")):
        time.sleep(0.0005)
    time.sleep(trial.rng.uniform(0, 0.02))
    for pid in [started.process.pid, *started.processes()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return started


def during_preprocess(trial: Trial) -> Started:
    """The command, while it builds a dataset of its own (another vocabulary gives another key; it is compared by its bytes)."""
    trial.overrides.append(f"runtime.home={trial.lab.home / trial.name}")
    started = trial.start()
    time.sleep(trial.rng.uniform(0.3, 2.5))
    os.kill(started.process.pid, signal.SIGKILL)
    return started


def injected(module: str, body: str, **words: str) -> Callable[[Trial], Started]:
    def strike(trial: Trial) -> Started:
        folder = Path(tempfile.mkdtemp(dir=trial.lab.home))
        text = body.replace(
            "AT", str(max(1, trial.at // 11) if module == "infini_llama.tasks.storage.artifacts" else trial.at)
        )
        for name, value in words.items():
            text = text.replace(name, value)
        trial.overrides.append(inject(folder, module, text))
        return trial.start()

    return strike


def disk_full(trial: Trial) -> Started:
    trial.largest_file = 300_000
    started = trial.start()
    started.wait()
    trial.largest_file = None
    return started


def bit_flip(trial: Trial) -> Started:
    """The command is killed, and a random bit of its newest checkpoint flips before it runs again."""
    trial.at = max(trial.at, 21)
    started = signalled(signal.SIGKILL, lambda trial, started: started.process.pid)(trial)
    started.wait()
    while started.processes():
        time.sleep(0.05)
    newest = sorted((trial.lab.run_dir(trial.name) / "checkpoints").glob("step-????????"))[-1]
    file = trial.rng.choice([path for path in newest.iterdir() if path.stat().st_size])
    data = bytearray(file.read_bytes())
    data[trial.rng.randrange(len(data))] ^= 1 << trial.rng.randrange(8)
    file.write_bytes(data)
    return started


def server(number: signal.Signals) -> Callable[[Trial], Started]:
    """Prefect's server dies, or hangs: it takes connections and answers none."""

    def strike(trial: Trial) -> Started:
        trial.direct = False
        started = trial.start()
        trial.reach(started)
        os.kill(trial.pids(started, "uvicorn")[0], number)
        return started

    return strike


FAULTS: dict[str, Callable[[Trial], Started]] = {
    "SIGKILL worker": signalled(signal.SIGKILL, Trial.worker),
    "SIGKILL torchrun": signalled(signal.SIGKILL, Trial.torchrun),
    "SIGKILL command": signalled(signal.SIGKILL, lambda trial, started: started.process.pid),
    "SIGSTOP worker": signalled(signal.SIGSTOP, Trial.worker),
    "SIGTERM worker": signalled(signal.SIGTERM, Trial.worker),
    "SIGTERM torchrun": signalled(signal.SIGTERM, Trial.torchrun),
    "SIGTERM command": signalled(signal.SIGTERM, lambda trial, started: started.process.pid),
    "SIGINT command": signalled(signal.SIGINT, lambda trial, started: started.process.pid),
    "raise": injected("infini_llama.tasks.train.worker.step", RAISE, END='raise RuntimeError("the injected fault")'),
    "exit": injected("infini_llama.tasks.train.worker.step", RAISE, END="os._exit(3)"),
    "kill before the rename": injected(
        "infini_llama.tasks.storage.artifacts", RENAME, BEFORE="os.kill(os.getpid(), signal.SIGKILL)"
    ),
    "kill after the rename": injected("infini_llama.tasks.storage.artifacts", RENAME, BEFORE="pass"),
    "kill during save": during_save,
    "kill during preprocess": during_preprocess,
    "disk full": disk_full,
    "bit flip": bit_flip,
    "Prefect server killed": server(signal.SIGKILL),
    "Prefect server hung": server(signal.SIGSTOP),
}


def run_trial(lab: Laboratory, fault: str, attention: str, seed: str, expected: dict, metrics: list[dict]) -> dict:
    """Strikes once and repeats the command until it ends well; the row of the table."""
    trial = Trial(lab, seed.replace(" ", "-"), attention, random.Random(seed))
    began = time.monotonic()
    started = FAULTS[fault](trial)
    codes, orphans = [started.wait()], 0
    while codes[-1] != 0 and len(codes) < 4:
        again = trial.start()
        codes.append(again.wait())
        orphans += len(again.processes())
    orphans += len(started.processes())
    home = lab.home / trial.name if fault == "kill during preprocess" else lab.home
    run_dir = home / "runs" / trial.name
    summary = json.loads((run_dir / "summary.json").read_text()) if codes[-1] == 0 else {}
    equal = all(summary.get(name) == expected[name] for name in ("weights_sha256", "optimizer_sha256"))
    equal = equal and exact_metrics(run_dir) == metrics
    return {
        "fault": fault,
        "attention": attention,
        "moment": trial.at,
        "exit_codes": codes,
        "attempts": summary.get("attempts"),
        "seconds": round(time.monotonic() - began, 1),
        "orphans": orphans,
        "bitwise_equal": equal,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=17)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=FAULTS, help="one fault instead of all in turn")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(FAULTS)
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "torch": version("torch"),
        "prefect": version("prefect"),
    }
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        lab = Laboratory(Path(folder), Path(folder) / "config.yaml")
        lab.config.write_text(yaml.safe_dump(CONFIG))
        calm = {}
        for number in range(arguments.n):
            fault, attention = names[number % len(names)], ("softmax", "infini")[(number // len(names)) % 2]
            if attention not in calm:
                name = f"calm-{attention}"
                overrides = (f"model.attention={attention}", f"environment.nproc_per_node={WORKERS}")
                calm[attention] = (lab.finish(name, *overrides), exact_metrics(lab.run_dir(name)))
            seed = f"{fault} {arguments.seed}-{number}"
            row = {"seed": arguments.seed, "number": number} | run_trial(lab, fault, attention, seed, *calm[attention])
            bad += not row["bitwise_equal"] or row["orphans"] > 0
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | {"machine": machine}) + "\n")
            codes = " ".join(map(str, row["exit_codes"]))
            verdict = "equal" if row["bitwise_equal"] else "DIFFERENT"
            print(
                f"{number:4} {fault:<24} {attention:<8} at {row['moment']:<4} codes {codes:<10} attempts {row['attempts']} "
                f"{row['seconds']:6.1f} s  orphans {row['orphans']}  {verdict}",
                flush=True,
            )
    print(f"{arguments.n - bad} of {arguments.n} ended bitwise equal with no process left behind")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
