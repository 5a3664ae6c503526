"""A training step against others': transformers in a plain loop and in Trainer, litgpt, and a plain PyTorch loop over our model.

    .venv/bin/pip install 'infini-llama[bench]'
    .venv/bin/pip install --no-deps --target /tmp/litgpt litgpt lightning lightning-utilities torchmetrics pytorch-lightning \
        jsonargparse typeshed_client
    .venv/bin/python benchmarks/training.py [--litgpt /tmp/litgpt] [--sizes s m] [--vocabularies 8192 32000] [--rounds 5]

All start from the same weights and take the same batches (2,048 tokens in rows of 512, random), with AdamW without decay and gradients
clipped to 1, so their losses have to agree. Where the processor multiplies bf16, all run in bf16 autocast over fp32 weights; elsewhere
all run in fp32, which is the default of each and faster than emulated bf16 (--precision). Each is a process of its own; they take
turns, a few steps each, so that a busy machine strikes all of them. What counts is the median over the rounds of the ratio to Trainer
as shipped, of wall time and of processor time, which neighbours disturb less.

Ours is `optimizer_step` of the workers under the default plan, without compilation; `ours compiled` adds train.compile=whole;
`ours compiled, sdpa` shows what the attention backend changes. `shipped`: every process with its library's defaults and the system's
allocator; `our allocator`: with the variables of our allocator, too. Threads are the same everywhere.
Where the time goes: the parts of one more step of ours, and the limit: what its products alone take at the fastest speed measured.
The denominator of MFU is the fastest matrix product of all turns, so the one that neighbours disturbed least.
Results go to benchmarks/results/training.json, a row per size, vocabulary, processor and precision.
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

from training_peer import LENGTH, ROWS, SIZES

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.planning.pin import settings_of
from infini_llama.tasks.patch_environment.planning.plan import resolve
from infini_llama.tasks.patch_environment.probe.machine import Machine
from infini_llama.tasks.patch_environment.probe.probe import cpu, probe
from infini_llama.tasks.records.plan import EnvironmentPlan

RESULTS = Path(__file__).with_name("results") / "training.json"
PEER = Path(__file__).with_name("training_peer.py")
OURS = ("ours eager", "ours compiled", "ours compiled, sdpa")
SETTINGS = ("precision", "attention_backend", "loss_chunk", "allocator")
PEERS = ("trainer", "transformers", "litgpt", "plain loop")
ALLOCATOR = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_CONF", "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD")


class Contestant:
    """A process that computes a few steps when told, and says how long they took."""

    def __init__(self, name: str, allocator: dict[str, str], order: dict[str, Any]) -> None:
        self.name = name
        clean = {key: value for key, value in os.environ.items() if key not in ALLOCATOR}
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


def default_plan(size: str, vocabulary: int, arguments: argparse.Namespace, home: str) -> EnvironmentPlan:
    """The default plan of our step, without compilation, on a machine that has nothing else to do."""
    hidden, inner, layers, heads, kv = SIZES[size]
    model = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    environment = {"device": "cpu", "nproc_per_node": 1, "threads": arguments.threads}
    sections = {
        "data": {"source": "python-stdlib", "sequence_length": LENGTH, "tokenizer": {"vocab_size": vocabulary}},
        "model": model | {"num_attention_heads": heads, "num_key_value_heads": kv},
        "train": {"global_batch_size": ROWS, "micro_batch_size": ROWS, "compile": "off"},
        "environment": environment | {"precision": arguments.precision},
        "runtime": {"home": home},
    }
    facts = probe(Path(home)).model_copy(update={"load": 0.0})
    config = PipelineConfig.model_validate(sections)
    return resolve(config, facts)


def compete(size: str, vocabulary: int, arguments: argparse.Namespace, home: str) -> dict[str, Any]:
    """One size and vocabulary: medians, ratios and losses of every contestant."""
    plan = default_plan(size, vocabulary, arguments, home)
    order = {"size": size, "vocabulary": vocabulary, "threads": arguments.threads, "steps": arguments.steps}
    order |= {"turns": arguments.rounds + 1, "litgpt": arguments.litgpt, "home": home, "plan": plan.to_json()}
    ours, system = {name: value for name, value in plan.env.items() if name in ALLOCATOR}, {}
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
    settings = {name: value for name, value in settings_of(plan).to_json().items() if name in SETTINGS}
    return {"size": size, "vocabulary": vocabulary, "settings": settings} | summary(turns, arguments.steps)


def summary(turns: dict[str, list[dict[str, Any]]], steps: int) -> dict[str, Any]:
    """Of the turns of each contestant, the first of which does not count, of `steps` each; the limit includes attention's products."""
    tokens = steps * next(iter(turns.values()))[0]["tokens"]
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
        if profile := measured[-1].get("profile"):
            step = statistics.median(turn["wall"] for turn in measured[1:]) / steps
            limit = flops / steps / peak
            found[label] |= {"step_seconds": step, "limit_seconds": limit, "where the time goes": profile}
    first = [entry["losses"] for entry in found.values()]
    apart = max(abs(a - b) / a for losses in first for a, b in zip(first[0], losses, strict=True))
    return {"contestants": found, "losses_differ_relatively_by_at_most": apart}


def processor_name() -> str:
    """Model, and what multiplies bf16."""
    found = cpu(Machine())
    return f"{found.model}, {'AMX' if found.amx else 'AVX512-BF16' if found.bf16 else 'no bf16'}"


def key_of(row: dict[str, Any]) -> tuple[str, int, str, str]:
    """What a row is of; rows without settings are of bf16."""
    return row["size"], row["vocabulary"], row["processor"], row.get("settings", {}).get("precision", "bf16")


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
    parser.add_argument("--precision", choices=["bf16", "fp32"], help="default: bf16 where the processor multiplies it")
    parser.add_argument("--litgpt", default=None, help="folder that litgpt was installed into; default: without it")
    arguments = parser.parse_args()
    processor = processor_name()
    arguments.precision = arguments.precision or ("fp32" if processor.endswith("no bf16") else "bf16")
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
                same = (size, vocabulary, processor, arguments.precision)
                kept = [old for old in results["rows"] if key_of(old) != same]
                results = {"rows": [*kept, row]}
                RESULTS.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
