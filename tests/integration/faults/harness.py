"""Random faults against real runs: `make faults N=40 SEED=1` injects N of them and prints the result of each.

Each fault strikes a run of its own in one of four phases (start-up, in mid-run, its ending, the start-up of a resume), at a moment drawn
from the seed. The same command then runs again, as a user would do, until it ends well, and the result is compared with the
undisturbed run. Fifty-eight rows hold two of every kind. Results are appended, with commit, machine and versions, to
benchmarks/results/faults.jsonl.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.laboratory import (
    CONFIG,
    Laboratory,
    Started,
    exact_metrics,
    inject,
    workers_of,
)

RESULTS = Path(__file__).parents[3] / "benchmarks/results/faults.jsonl"
WORKERS = 2
# more text, so that a kill can hit its preparation
LARGER = CONFIG | {
    "data": CONFIG["data"]
    | {"source": "python-stdlib", "files": [], "sequence_length": 64}
}
LAST_STEP = CONFIG["train"]["max_steps"]
START_UP, MID_RUN, ENDING, RESUME = PHASES = ("start-up", "mid-run", "ending", "resume")
STARTING_SECONDS = 3.0  # from the first worker's process to about the first step

RAISE = """
def change(module):
    step, calls = module.optimizer_step, []
    def failing(*arguments):
        calls.append(1)
        if len(calls) == AT and os.environ["RANK"] == "1" and once():
            END
        return step(*arguments)
    module.optimizer_step = failing
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
REPORT = """
def change(module):
    scalars, calls = module.TensorBoard.scalars, []
    def struck(self, *arguments):
        calls.append(1)
        if len(calls) == AT and once():
            import time, signal
            END
        return scalars(self, *arguments)
    module.TensorBoard.scalars = struck
"""
# Modules whose injected function is called about once in ten steps.
RARELY_CALLED = (
    "infini_llama.tasks.storage.artifacts",
    "infini_llama.tasks.train.worker.callbacks.metrics_writer",
)


class Trial:
    """One run under one fault, which strikes in `phase`."""

    def __init__(
        self, lab: Laboratory, name: str, attention: str, phase: str, rng: random.Random
    ) -> None:
        self.lab, self.name, self.phase, self.rng = lab, name, phase, rng
        self.at = rng.randint(3, 50)
        self.direct, self.struck = True, True
        self.codes: list[
            int
        ] = []  # of commands that have ended, the one of the fault excepted
        self.overrides = [
            f"model.attention={attention}",
            f"environment.nproc_per_node={WORKERS}",
            "runtime.hang_timeout=4",
        ]
        self.largest_file: int | None = None

    def start(self) -> Started:
        return self.lab.start(
            self.name,
            *self.overrides,
            direct=self.direct,
            largest_file=self.largest_file,
        )

    def begin(self) -> Started:
        """The command that the fault strikes: the first, or the second, which resumes a killed run."""
        if self.phase == RESUME:
            killed = self.start()
            self.lab.wait_for_step(self.name, self.at, killed)
            self.codes.append(kill_all(killed))
        return self.start()

    def pids(self, started: Started, mark: str) -> list[int]:
        return sorted(
            pid for pid, command in started.processes().items() if mark in command
        )

    def worker(self, started: Started) -> int:
        return self.rng.choice(workers_of(started.marker))

    def torchrun(self, started: Started) -> int:
        return self.pids(started, "tasks.train.torchrun")[0]

    def reach(self, started: Started) -> None:
        """Waits for a moment of the phase."""
        if self.phase == MID_RUN:
            self.lab.wait_for_step(self.name, self.at, started)
        elif (
            self.phase == ENDING
        ):  # the last evaluation, the last save and the result follow
            self.lab.wait_for_step(self.name, LAST_STEP, started)
            time.sleep(self.rng.uniform(0, 0.3))
        else:
            while not workers_of(started.marker):
                assert started.process.poll() is None, (
                    f"ended before a worker started:\n{started.log.read_text()}"
                )
                time.sleep(0.01)
            time.sleep(self.rng.uniform(0, STARTING_SECONDS))
        time.sleep(self.rng.uniform(0, 0.05))

    def send(
        self,
        number: signal.Signals,
        victim: Callable[["Trial", Started], int],
        started: Started,
    ) -> None:
        """What has ended by now cannot be struck, which the row says."""
        try:
            os.kill(victim(self, started), number)
        except (IndexError, ProcessLookupError):
            self.struck = False


def kill_all(started: Started) -> int:
    """Kills the command and everything below it at once; returns its exit code."""
    for pid in [started.process.pid, *started.processes()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    code = started.wait()
    while started.processes():
        time.sleep(0.02)
    return code


def signalled(
    number: signal.Signals, victim: Callable[[Trial, Started], int]
) -> Callable[[Trial], Started]:
    def strike(trial: Trial) -> Started:
        started = trial.begin()
        trial.reach(started)
        trial.send(number, victim, started)
        return started

    return strike


def whole_tree(trial: Trial) -> Started:
    """The command and everything below it at once."""
    started = trial.begin()
    trial.reach(started)
    trial.struck = started.process.poll() is None
    kill_all(started)
    return started


def during_save(trial: Trial) -> Started:
    """Everything at once, while a checkpoint is being written."""
    trial.at = min(trial.at, LAST_STEP - 15)
    started = trial.begin()
    trial.lab.wait_for_step(
        trial.name, LAST_STEP - 5 if trial.phase == ENDING else trial.at + 1, started
    )
    while not any((trial.lab.run_dir(trial.name) / "checkpoints").glob(".step-*")):
        time.sleep(0.0005)
    time.sleep(trial.rng.uniform(0, 0.02))
    kill_all(started)
    return started


def during_preprocess(trial: Trial) -> Started:
    """The command, while it builds a dataset of its own (another vocabulary gives another key; it is compared by its bytes)."""
    trial.overrides.append(f"runtime.home={trial.lab.home / trial.name}")
    if trial.phase == RESUME:
        trial.codes.append(killed_early(trial).wait())
    return killed_early(trial)


def killed_early(trial: Trial) -> Started:
    started = trial.start()
    time.sleep(trial.rng.uniform(0.3, 2.5))
    os.kill(started.process.pid, signal.SIGKILL)
    return started


def reached(trial: Trial) -> Started:
    started = trial.start()
    trial.lab.wait_for_step(trial.name, trial.at, started)
    return started


def injected(module: str, body: str, **words: str) -> Callable[[Trial], Started]:
    def strike(trial: Trial) -> Started:
        folder = Path(tempfile.mkdtemp(dir=trial.lab.home))
        if trial.phase == RESUME:
            trial.codes.append(kill_all(reached(trial)))
        # Counted by each process.
        step = {START_UP: 1, ENDING: LAST_STEP, RESUME: 1}.get(trial.phase, trial.at)
        text = body.replace(
            "AT",
            str(max(1, step // 10) if module in RARELY_CALLED else step),
        )
        for name, value in words.items():
            text = text.replace(name, value)
        trial.overrides.append(inject(folder, module, text))
        return trial.start()

    return strike


def during_samples(
    number: signal.Signals, victim: Callable[[Trial, Started], int]
) -> Callable[[Trial], Started]:
    """A signal while the first rank writes texts, after an evaluation or at the end."""

    def strike(trial: Trial) -> Started:
        trial.overrides.append("train.sample_tokens=300")
        if trial.phase == RESUME:
            trial.at = min(trial.at, 30)
        started = trial.begin()
        if trial.phase == ENDING:
            trial.lab.wait_for_step(trial.name, LAST_STEP, started)
        while not is_sampling(trial):
            if started.process.poll() is not None:
                trial.struck = False
                return started
            time.sleep(0.0005)
        time.sleep(trial.rng.uniform(0, 0.1))
        trial.send(number, victim, started)
        return started

    return strike


def is_sampling(trial: Trial) -> bool:
    """Whether the first rank of the newest attempt writes texts."""
    attempts = sorted((trial.lab.run_dir(trial.name) / "logs").glob("attempt-*"))
    with suppress(OSError, IndexError):
        return (attempts[-1] / "heartbeat-0").read_text().split()[1] == "samples"
    return False


def happens(started: Started, event: Callable[[], bool]) -> bool:
    """Wait for an event; False: the command has ended before."""
    while not event():
        if started.process.poll() is not None:
            return False
        time.sleep(0.01)
    return True


def is_measuring(trial: Trial, started: Started) -> bool:
    return "measuring perplexity" in started.log.read_text()


def is_measured(trial: Trial, started: Started) -> bool:
    """The export follows."""
    return (trial.lab.run_dir(trial.name) / "evaluations.jsonl").exists()


def after_training(
    number: signal.Signals, event: Callable[[Trial, Started], bool]
) -> Callable[[Trial], Started]:
    """A signal to the command after the last step, some time after this event."""

    def strike(trial: Trial) -> Started:
        trial.overrides.append("evaluate.after_training=[perplexity,export]")
        started = trial.begin()
        trial.struck = happens(started, lambda: event(trial, started))
        time.sleep(trial.rng.uniform(0, 0.3))
        trial.send(number, command_of, started)
        return started

    return strike


def in_the_delay(number: signal.Signals) -> Callable[[Trial], Started]:
    """A signal to the command while it waits for another attempt, after a worker was killed."""

    def strike(trial: Trial) -> Started:
        trial.overrides.append("runtime.retry_delay=5")
        started = trial.begin()
        trial.reach(started)
        trial.send(signal.SIGKILL, Trial.worker, started)
        trial.struck = trial.struck and happens(
            started, lambda: "retrying in" in started.log.read_text()
        )
        time.sleep(trial.rng.uniform(0, 0.5))
        trial.send(number, command_of, started)
        return started

    return strike


def disk_full(trial: Trial) -> Started:
    if trial.phase == RESUME:
        trial.at = max(trial.at, 11)
        trial.codes.append(kill_all(reached(trial)))
    trial.largest_file = 300_000
    started = trial.start()
    started.wait()
    trial.largest_file = None
    return started


def bit_flip(trial: Trial) -> Started:
    """The command is killed, and a random bit of its newest checkpoint flips before it runs again."""
    trial.at = max(trial.at, 21)
    started = reached(trial)
    kill_all(started)
    newest = sorted(
        (trial.lab.run_dir(trial.name) / "checkpoints").glob("step-????????")
    )[-1]
    file = trial.rng.choice([path for path in newest.iterdir() if path.stat().st_size])
    data = bytearray(file.read_bytes())
    data[trial.rng.randrange(len(data))] ^= 1 << trial.rng.randrange(8)
    file.write_bytes(data)
    return started


def server(number: signal.Signals) -> Callable[[Trial], Started]:
    """Prefect's server dies, or hangs: it takes connections and answers none."""

    def strike(trial: Trial) -> Started:
        trial.direct = False
        started = trial.begin()
        trial.reach(started)
        trial.send(
            number, lambda trial, started: trial.pids(started, "uvicorn")[0], started
        )
        return started

    return strike


@dataclass(frozen=True)
class Fault:
    """What strikes, and the phases in which it can."""

    strike: Callable[[Trial], Started]
    phases: tuple[str, ...] = PHASES


def command_of(trial: Trial, started: Started) -> int:
    return started.process.pid


# New ones come last: a row's kind is its number modulo how many there are.
FAULTS: dict[str, Fault] = {
    "SIGKILL worker": Fault(signalled(signal.SIGKILL, Trial.worker)),
    "SIGKILL torchrun": Fault(signalled(signal.SIGKILL, Trial.torchrun)),
    "SIGKILL command": Fault(signalled(signal.SIGKILL, command_of)),
    "SIGSTOP worker": Fault(signalled(signal.SIGSTOP, Trial.worker)),
    "SIGTERM worker": Fault(signalled(signal.SIGTERM, Trial.worker)),
    "SIGTERM torchrun": Fault(signalled(signal.SIGTERM, Trial.torchrun)),
    "SIGTERM command": Fault(signalled(signal.SIGTERM, command_of)),
    "SIGINT command": Fault(signalled(signal.SIGINT, command_of)),
    "raise": Fault(
        injected(
            "infini_llama.tasks.train.worker.trainer",
            RAISE,
            END='raise RuntimeError("the injected fault")',
        )
    ),
    "exit": Fault(
        injected("infini_llama.tasks.train.worker.trainer", RAISE, END="os._exit(3)")
    ),
    "kill before the rename": Fault(
        injected(
            "infini_llama.tasks.storage.artifacts",
            RENAME,
            BEFORE="os.kill(os.getpid(), signal.SIGKILL)",
        )
    ),
    "kill after the rename": Fault(
        injected("infini_llama.tasks.storage.artifacts", RENAME, BEFORE="pass")
    ),
    "kill during save": Fault(during_save, (MID_RUN, ENDING, RESUME)),
    "kill during preprocess": Fault(during_preprocess, (START_UP, RESUME)),
    "disk full": Fault(disk_full, (MID_RUN, RESUME)),
    "bit flip": Fault(bit_flip, (MID_RUN,)),
    "Prefect server killed": Fault(server(signal.SIGKILL)),
    "Prefect server hung": Fault(server(signal.SIGSTOP)),
    "SIGKILL whole tree": Fault(whole_tree),
    "SIGHUP command": Fault(signalled(signal.SIGHUP, command_of)),
    "SIGKILL worker during samples": Fault(
        during_samples(signal.SIGKILL, Trial.worker), (MID_RUN, ENDING, RESUME)
    ),
    "SIGTERM command during samples": Fault(
        during_samples(signal.SIGTERM, command_of), (MID_RUN, ENDING, RESUME)
    ),
    "kill in a reporter": Fault(
        injected(RARELY_CALLED[1], REPORT, END="os.kill(os.getpid(), signal.SIGKILL)")
    ),
    "hang in a reporter": Fault(
        injected(RARELY_CALLED[1], REPORT, END="time.sleep(10000)")
    ),
    "SIGKILL command while it measures": Fault(
        after_training(signal.SIGKILL, is_measuring), (ENDING,)
    ),
    "SIGTERM command while it measures": Fault(
        after_training(signal.SIGTERM, is_measuring), (ENDING,)
    ),
    "SIGTERM command while it exports": Fault(
        after_training(signal.SIGTERM, is_measured), (ENDING,)
    ),
    "SIGTERM command in the delay of a retry": Fault(
        in_the_delay(signal.SIGTERM), (START_UP, MID_RUN, RESUME)
    ),
    "SIGKILL command in the delay of a retry": Fault(
        in_the_delay(signal.SIGKILL), (START_UP, MID_RUN, RESUME)
    ),
}


def run_trial(
    lab: Laboratory,
    fault: str,
    attention: str,
    phase: str,
    seed: str,
    expected: dict,
    metrics: list[dict],
) -> dict:
    """Strikes once and repeats the command until it ends well; the row of the table."""
    trial = Trial(lab, seed.replace(" ", "-"), attention, phase, random.Random(seed))
    began = time.monotonic()
    started = FAULTS[fault].strike(trial)
    codes, orphans = [*trial.codes, started.wait()], 0
    while codes[-1] != 0 and len(codes) < 5:
        again = trial.start()
        codes.append(again.wait())
        orphans += len(again.processes())
    orphans += len(started.processes())
    home = lab.home / trial.name if fault == "kill during preprocess" else lab.home
    run_dir = home / "runs" / trial.name
    summary = (
        json.loads((run_dir / "summary.json").read_text()) if codes[-1] == 0 else {}
    )
    equal = all(
        summary.get(name) == expected[name]
        for name in ("weights_sha256", "optimizer_sha256")
    )
    equal = equal and exact_metrics(run_dir) == metrics
    return {
        "fault": fault,
        "attention": attention,
        "phase": phase,
        "moment": trial.at,
        "struck": trial.struck,
        "exit_codes": codes,
        "attempts": summary.get("attempts"),
        "seconds": round(time.monotonic() - began, 1),
        "orphans": orphans,
        "bitwise_equal": equal,
    }


def commit() -> str:
    """The commit of this tree, marked where files other than results differ from it."""
    git = ["git", "-C", str(RESULTS.parents[2])]
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    differing = subprocess.run(
        [*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"],
        check=False,
    )
    return f"{head}-dirty" if differing.returncode else head


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="number of the first row, to repeat one of a seed",
    )
    parser.add_argument(
        "--only", choices=FAULTS, help="one fault instead of all in turn"
    )
    parser.add_argument(
        "--phase", choices=PHASES, help="one phase instead of all in turn"
    )
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
        lab.config.write_text(yaml.safe_dump(LARGER))
        calm = {}
        for number in range(arguments.first, arguments.first + arguments.n):
            turn, kind = divmod(number, len(names))
            fault, attention = names[kind], ("softmax", "infini")[turn % 2]
            phases = FAULTS[fault].phases
            phase = arguments.phase or phases[(kind + turn) % len(phases)]
            if attention not in calm:
                name = f"calm-{attention}"
                overrides = (
                    f"model.attention={attention}",
                    f"environment.nproc_per_node={WORKERS}",
                )
                calm[attention] = (
                    lab.finish(name, *overrides),
                    exact_metrics(lab.run_dir(name)),
                )
            seed = f"{fault} {arguments.seed}-{number}"
            row = run_trial(lab, fault, attention, phase, seed, *calm[attention])
            row = {"seed": arguments.seed, "number": number, "commit": commit()} | row
            bad += not row["bitwise_equal"] or row["orphans"] > 0
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | {"machine": machine}) + "\n")
            codes = " ".join(map(str, row["exit_codes"]))
            verdict = ("equal" if row["bitwise_equal"] else "DIFFERENT") + (
                "" if row["struck"] else " (ended before)"
            )
            print(
                f"{number:4} {fault:<30} {attention:<8} {phase:<9} at {row['moment']:<4} codes {codes:<10} attempts {row['attempts']} "
                f"{row['seconds']:6.1f} s  orphans {row['orphans']}  {verdict}",
                flush=True,
            )
    print(
        f"{arguments.n - bad} of {arguments.n} ended bitwise equal with no process left behind"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
