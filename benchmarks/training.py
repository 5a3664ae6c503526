"""A training step against others': transformers in a plain loop and in Trainer, litgpt, and a plain PyTorch loop over our model.

    .venv/bin/pip install 'infini-llama[bench]'
    .venv/bin/pip install --no-deps --target /tmp/litgpt litgpt lightning lightning-utilities torchmetrics pytorch-lightning \
        jsonargparse typeshed_client
    .venv/bin/python benchmarks/training.py [--litgpt /tmp/litgpt] [--sizes s m] [--vocabularies 8192 32000] [--rounds 5]

All start from the same weights and take the same batches (2,048 tokens in rows of 512, random), in bf16 autocast over fp32 weights, with
AdamW without decay and gradients clipped to 1, so their losses have to agree. Each is a process of its own; they take turns, a few steps
each, so that a busy machine strikes all of them. What counts is the median over the rounds of the ratio to Trainer as shipped, of wall
time and of processor time, which neighbours disturb less.

Ours is `optimizer_step` of the workers under the settings that environment.tune=full chooses among. `shipped`: every process with its
library's defaults and the system's allocator; `equal`: the others with our allocator settings, too. Threads are the same everywhere.
The denominator of MFU is the fastest matrix product of all turns, so the one that neighbours disturbed least.
Results go to benchmarks/results/training.json, a row per size, vocabulary and processor.
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
from typing import Any

from infini_llama.tasks.patch_environment.probe.machine import Machine
from infini_llama.tasks.patch_environment.probe.probe import cpu

RESULTS = Path(__file__).with_name("results") / "training.json"
PEER = Path(__file__).with_name("training_peer.py")
OURS = ("ours eager", "ours compiled")
PEERS = ("trainer", "transformers", "litgpt", "plain loop")
GLIBC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456"


class Contestant:
    """A process that computes a few steps when told, and says how long they took."""

    def __init__(self, name: str, allocator: dict[str, str], order: dict[str, Any]) -> None:
        self.name = name
        clean = {key: value for key, value in os.environ.items() if key not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
        threads = {"OMP_NUM_THREADS": str(order["threads"]), "MKL_NUM_THREADS": str(order["threads"])}
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), name, json.dumps(order)],
            env=clean | threads | allocator,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self) -> dict[str, Any]:
        """{"wall", "cpu": seconds of a turn's steps, "losses"}."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def compete(size: str, vocabulary: int, arguments: argparse.Namespace, home: str) -> dict[str, Any]:
    """One size and vocabulary: medians, ratios and losses of every contestant."""
    order = {"size": size, "vocabulary": vocabulary, "threads": arguments.threads, "steps": arguments.steps}
    order |= {"turns": arguments.rounds + 1, "litgpt": arguments.litgpt, "home": home}
    ours, system = {"GLIBC_TUNABLES": GLIBC}, {}
    lanes = [(f"{name}, our allocator", name, ours) for name in OURS if name in arguments.contestants]
    for peer in PEERS:
        if peer in arguments.contestants and (peer != "litgpt" or arguments.litgpt):
            lanes += [(f"{peer}, shipped", peer, system), (f"{peer}, our allocator", peer, ours)]
    turns: dict[str, list[dict[str, Any]]] = {label: [] for label, _, _ in lanes}
    contestants = [(label, Contestant(name, allocator, order)) for label, name, allocator in lanes]
    try:
        for _ in range(arguments.rounds + 1):  # the first one warms up
            for label, contestant in contestants:
                turns[label].append(contestant.turn())
    finally:
        for _, contestant in contestants:
            contestant.end()
    tokens = arguments.steps * turns[lanes[0][0]][0]["tokens"]
    found: dict[str, Any] = {}
    for label, measured in turns.items():
        timed = measured[1:]
        found[label] = {
            "tokens_per_second": tokens / statistics.median(turn["wall"] for turn in timed),
            "cpu_seconds_per_1000_tokens": 1000 * statistics.median(turn["cpu"] for turn in timed) / tokens,
            "losses": [loss for turn in measured for loss in turn["losses"]],
        }
        for base in ("trainer, shipped", "trainer, our allocator", "litgpt, our allocator"):
            if base in turns:
                found[label][f"over {base}"] = {
                    clock: spread([a[clock] / b[clock] for a, b in zip(turns[base][1:], timed, strict=True)])
                    for clock in ("wall", "cpu")
                }
    peak = max(turn["ceiling"] for measured in turns.values() for turn in measured)
    for label, measured in turns.items():
        flops = measured[0]["flops_per_token"] * tokens
        found[label]["mfu"] = spread([flops / turn["wall"] / peak for turn in measured[1:]])
        found[label]["where the time goes"] = measured[-1].get("profile")
    first = [entry["losses"] for entry in found.values()]
    apart = max(abs(a - b) / a for losses in first for a, b in zip(first[0], losses, strict=True))
    return {"size": size, "vocabulary": vocabulary, "contestants": found, "losses_differ_relatively_by_at_most": apart}


def processor_name() -> str:
    """Model, and what multiplies bf16."""
    found = cpu(Machine())
    return f"{found.model}, {'AMX' if found.amx else 'AVX512-BF16' if found.bf16 else 'no bf16'}"


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["s", "m"])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 32000])
    parser.add_argument("--contestants", nargs="+", default=[*OURS, *PEERS], choices=[*OURS, *PEERS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of one turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--litgpt", default=None, help="folder that litgpt was installed into; default: without it")
    arguments = parser.parse_args()
    processor = processor_name()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": []}
    with tempfile.TemporaryDirectory(prefix="training-") as home:
        for size in arguments.sizes:
            for vocabulary in arguments.vocabularies:
                began = time.time()
                row = compete(size, vocabulary, arguments, home)
                for label, entry in row["contestants"].items():
                    speed = f"{entry['tokens_per_second']:8,.0f} tokens/s  MFU {entry['mfu']['median']:.0%}"
                    if ratio := entry.get("over trainer, shipped"):
                        speed += f"  {ratio['wall']['median']:.2f}x wall, {ratio['cpu']['median']:.2f}x cpu of Trainer as shipped"
                    print(f"{size} {vocabulary:>6} {label:32} {speed}", flush=True)
                row |= {
                    "processor": processor,
                    "rounds": arguments.rounds,
                    "steps_a_turn": arguments.steps,
                    "threads": arguments.threads,
                }
                row |= {"load": os.getloadavg(), "time": began, "platform": platform.platform()}
                same = (size, vocabulary, processor)
                kept = [old for old in results["rows"] if (old["size"], old["vocabulary"], old["processor"]) != same]
                results = {"rows": [*kept, row]}
                RESULTS.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
