"""A training step beside those of transformers' Trainer and litgpt: eager beside eager, compiled beside compiled.

    .venv/bin/pip install 'infini-llama[bench]'
    .venv/bin/pip install --no-deps --target /tmp/litgpt litgpt lightning lightning-utilities torchmetrics pytorch-lightning \
        jsonargparse typeshed_client
    .venv/bin/python benchmarks/training.py --litgpt /tmp/litgpt [--sizes s m] [--vocabularies 8192 32000] [--starts 5] [--rounds 9]

All start from the same weights and take the same batches (2,048 tokens in sequences of 512, random), with AdamW without decay and
gradients clipped to 1. Their losses have to agree within 1e-3; else the script ends with an error and stores nothing. Each lane is a
process of its own with the same number of threads; lanes take turns, a few steps each, so that a busy machine slows all of them.

Ours is `optimizer_step` of the workers under the plan that a user gets without setting a key, in one process; `eager` and `compiled`
are train.compile=off and whole. The peers compute in the precision of that plan. "as shipped": every setting is the library's default
and the allocator is the system's. "our allocator": with the variables that our plan sets for its allocator. "compiled": Trainer with
torch_compile=True, litgpt's model through torch.compile.

A start is a new plan and a new process of each lane; its result is the median over the rounds of the ratio within each round (time of
the other program over ours in the same mode). The median over the starts is printed with the lowest and highest start. Results go to
benchmarks/results/training.json, a row per size, vocabulary and kind of processor.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from agreement import require_close
from stored_rows import store
from training_peer import LENGTH, ROWS, SIZES

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment.machine import cpu
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.records.plan import EnvironmentPlan

RESULTS = Path(__file__).with_name("results") / "training.json"
PEER = Path(__file__).with_name("training_peer.py")
PROGRAMS = ("ours", "trainer", "litgpt")
SETTINGS = (
    "precision",
    "attention_backend",
    "loss_chunk",
    "allocator",
    "compile",
    "threads",
)
ALLOCATOR = (
    "LD_PRELOAD",
    "GLIBC_TUNABLES",
    "MALLOC_CONF",
    "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD",
)


class Lane(NamedTuple):
    """One program in one mode. our_allocator: under the variables of our allocator; ours always is."""

    program: str
    compiled: bool
    our_allocator: bool

    @property
    def mode(self) -> str:
        return "compiled" if self.compiled else "eager"

    @property
    def label(self) -> str:
        allocator = (
            ""
            if self.program == "ours"
            else ", our allocator"
            if self.our_allocator
            else ", as shipped"
        )
        return f"{self.program}, {self.mode}{allocator}"


class Peer:
    """The process of a lane, which computes a few steps per line that it is sent, and prints how long they took."""

    def __init__(
        self, lane: Lane, order: dict[str, Any], allocator: dict[str, str]
    ) -> None:
        self.label = lane.label
        clean = {
            key: value for key, value in os.environ.items() if key not in ALLOCATOR
        }
        threads = {
            "OMP_NUM_THREADS": str(order["threads"]),
            "MKL_NUM_THREADS": str(order["threads"]),
        }
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(PEER),
                lane.program,
                json.dumps(order | {"compiled": lane.compiled}),
            ],
            env=clean | threads | (allocator if lane.our_allocator else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self) -> dict[str, Any]:
        """{"wall", "cpu": seconds of the turn's steps, "losses", …}."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.label} exited with {self.process.wait()}")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def lanes_of(programs: list[str], modes: list[str]) -> list[Lane]:
    """Ours first in each mode, so that it is what the others are compared with."""
    compiled = [mode == "compiled" for mode in modes]
    found = [Lane("ours", mode, True) for mode in compiled if "ours" in programs]
    peers = [program for program in PROGRAMS[1:] if program in programs]
    return found + [
        Lane(peer, mode, ours)
        for peer in peers
        for mode in compiled
        for ours in (True, False)
    ]


def plan_of(
    size: str, vocabulary: int, threads: int, home: Path, **train: str
) -> EnvironmentPlan:
    """The plan that a user gets on this machine, for one process with this many threads."""
    hidden, inner, layers, heads, kv = SIZES[size]
    model = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
    }
    sections = {
        "data": {
            "source": "python-stdlib",
            "sequence_length": LENGTH,
            "tokenizer": {"vocab_size": vocabulary},
        },
        "model": model | {"num_attention_heads": heads, "num_key_value_heads": kv},
        "train": {"global_batch_size": ROWS, "micro_batch_size": ROWS} | train,
        "environment": {"device": "cpu", "nproc_per_node": 1, "threads": threads},
        "runtime": {"home": str(home)},
    }
    return plan_environment(PipelineConfig.model_validate(sections), probe(home))


def start(
    size: str, vocabulary: int, arguments: argparse.Namespace, home: Path
) -> dict[str, Any]:
    """New plans and processes: the turns of each lane, and its settings.

    Raises:
        SystemExit: the losses of two lanes differ.
    """
    lanes = lanes_of(arguments.programs, arguments.modes)
    turns: dict[str, list[dict[str, Any]]] = {lane.label: [] for lane in lanes}
    settings: dict[str, dict[str, Any]] = {}
    peers: list[Peer] = []
    try:
        for lane in lanes:
            compile = "whole" if lane.compiled else "off"
            plan = plan_of(size, vocabulary, arguments.threads, home, compile=compile)
            order = {
                "size": size,
                "vocabulary": vocabulary,
                "threads": arguments.threads,
                "steps": arguments.steps,
            }
            order |= {
                "turns": arguments.rounds + 1,
                "litgpt": arguments.litgpt,
                "home": str(home),
            }
            allocator = {
                name: value for name, value in plan.env.items() if name in ALLOCATOR
            }
            peers.append(Peer(lane, order | {"plan": plan.to_json()}, allocator))
            planned = {
                name: value
                for name, value in plan.to_json().items()
                if name in SETTINGS
            }
            settings[lane.label] = (
                planned if lane.program == "ours" else {"precision": plan.precision}
            )
            settings[lane.label] |= {
                "allocator variables": allocator if lane.our_allocator else {}
            }
        for _ in range(arguments.rounds + 1):  # the first one warms up
            for peer in peers:
                turns[peer.label].append(peer.turn())
    finally:
        for peer in peers:
            peer.end()
    apart = require_close(
        "the losses", {label: losses_of(measured) for label, measured in turns.items()}
    )
    for label, measured in turns.items():
        settings[label] |= measured[-1].get("settings", {})
    timed = {label: measured[1:] for label, measured in turns.items()}
    return {
        "lanes": {
            label: {
                clock: [turn[clock] for turn in measured] for clock in ("wall", "cpu")
            }
            for label, measured in timed.items()
        },
        "settings": settings,
        "profiles": {
            label: measured[-1]["profile"]
            for label, measured in timed.items()
            if "profile" in measured[-1]
        },
        "matmul_flops": max(
            turn["matmul_flops"] for measured in turns.values() for turn in measured
        ),
        "losses": losses_of(next(iter(turns.values()))),
        "losses_differ_relatively_by_at_most": apart,
        "load": os.getloadavg(),
        "time": time.time(),
    }


def losses_of(turns: list[dict[str, Any]]) -> list[float]:
    return [loss for turn in turns for loss in turn["losses"]]


def compete(
    size: str, vocabulary: int, arguments: argparse.Namespace, home: Path
) -> dict[str, Any]:
    """The row of one size and vocabulary."""
    default = plan_of(size, vocabulary, arguments.threads, home)
    row: dict[str, Any] = {
        "size": size,
        "vocabulary": vocabulary,
        "processor": processor_name(),
    }
    row |= {
        "threads": arguments.threads,
        "platform": platform.platform(),
        "torch": torch.__version__,
    }
    row |= {
        "rounds": arguments.rounds,
        "steps_per_turn": arguments.steps,
        "tokens_per_step": ROWS * LENGTH,
    }
    row |= {"compile_without_a_key": default.compile}
    return row | {
        "starts": [
            start(size, vocabulary, arguments, home) for _ in range(arguments.starts)
        ]
    }


def processor_name() -> str:
    """Model, and what multiplies bf16."""
    found = cpu(Machine())
    return f"{found.model}, {'AMX' if found.amx else 'AVX512-BF16' if found.bf16 else 'no bf16'}"


def ratio(row: dict[str, Any], lane: Lane) -> tuple[float, float, float]:
    """Time of this lane over ours in the same mode: median within each start, then over the starts with its range."""
    ours = Lane("ours", lane.compiled, True).label
    found = [
        statistics.median(
            theirs / mine
            for theirs, mine in zip(
                one["lanes"][lane.label]["wall"],
                one["lanes"][ours]["wall"],
                strict=True,
            )
        )
        for one in row["starts"]
    ]
    return statistics.median(found), min(found), max(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["s", "m"])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 32000])
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS], choices=PROGRAMS)
    parser.add_argument(
        "--modes",
        nargs="+",
        default=["eager", "compiled"],
        choices=["eager", "compiled"],
    )
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="of one turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--litgpt",
        default=None,
        help="folder that litgpt was installed into; default: without it",
    )
    arguments = parser.parse_args()
    if not arguments.litgpt:
        arguments.programs = [name for name in arguments.programs if name != "litgpt"]
    with tempfile.TemporaryDirectory(prefix="training-") as home:
        for size in arguments.sizes:
            for vocabulary in arguments.vocabularies:
                row = compete(size, vocabulary, arguments, Path(home))
                store(RESULTS, row, ("size", "vocabulary", "processor"))
                if "ours" in arguments.programs:
                    for lane in lanes_of(arguments.programs, arguments.modes):
                        ratios = "{:.2f} ({:.2f} to {:.2f})".format(*ratio(row, lane))
                        print(
                            f"{size}, {vocabulary:,}: {lane.label} {ratios}", flush=True
                        )


if __name__ == "__main__":
    main()
