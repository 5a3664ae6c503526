"""The head and the loss, forward and backward: all logits at once, in chunks, and torch's own chunked function.

    .venv/bin/python benchmarks/loss.py [--rounds 5]

2,048 tokens of width 256, vocabularies of 8,192 and 32,000, fp32 and, where the processor multiplies it, bf16 autocast, one thread.
Each variant runs in a process of its own, in turn; times are the process's own, memory is the growth of its peak resident size. All
keep freed memory, as workers do. The result goes to
benchmarks/results/loss.json; where the losses of two variants differ by more than 1e-3, nothing is stored.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from agreement import require_close

from infini_llama.model.loss import chunked_cross_entropy_sum, cross_entropy_sum
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment.machine import cpu
from infini_llama.tasks.patch_environment.worker_variables import GLIBC_TUNABLES

TOKENS, WIDTH = 2048, 256
CHUNKS = ("chunks of 64", "chunks of 256", "chunks of 1024", "chunks of 2048")
VARIANTS = ("all at once", *CHUNKS, "torch linear_cross_entropy")


def child(variant: str, vocabulary: int, precision: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(8, TOKENS // 8, WIDTH, requires_grad=True)
    weight = (torch.randn(vocabulary, WIDTH) * 0.02).requires_grad_()
    labels = torch.randint(0, vocabulary, (8, TOKENS // 8))

    def loss() -> torch.Tensor:
        if variant == "all at once":
            return cross_entropy_sum(F.linear(hidden, weight), labels)[0]
        if variant.startswith("chunks"):
            return chunked_cross_entropy_sum(
                hidden, weight, labels, int(variant.split()[-1])
            )[0]
        # Its default is all at once.
        options = torch.nn.LinearCrossEntropyOptions(acc_policy="accurate")
        rows = hidden.flatten(0, 1)
        return F.linear_cross_entropy(
            rows, weight, labels.flatten(), reduction="sum", options=options
        )

    seconds, total = [], torch.zeros(())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        hidden.grad = weight.grad = None
        started = time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            total = loss()
        (total / TOKENS).backward()
        seconds.append(time.process_time() - started)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(
        json.dumps(
            {"seconds": min(seconds[1:]), "bytes": grown, "loss": total.item() / TOKENS}
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child[0], int(options.child[1]), options.child[2])
    precisions = ("fp32", "bf16") if cpu(Machine()).bf16 else ("fp32",)
    cases = {f"{v:,} {p}": (str(v), p) for v in (8192, 32000) for p in precisions}
    runs: dict[str, dict[str, list[dict]]] = {
        case: {variant: [] for variant in VARIANTS} for case in cases
    }
    allocator = os.environ | {"GLIBC_TUNABLES": GLIBC_TUNABLES}
    for _ in range(options.rounds):
        for case, (vocabulary, precision) in cases.items():
            for variant in VARIANTS:
                command = [
                    sys.executable,
                    __file__,
                    "--child",
                    variant,
                    vocabulary,
                    precision,
                ]
                answer = subprocess.run(
                    command, check=True, capture_output=True, text=True, env=allocator
                )
                runs[case][variant].append(json.loads(answer.stdout))
        for case, variants in runs.items():
            losses = {
                variant: [run["loss"] for run in found]
                for variant, found in variants.items()
            }
            require_close(f"the losses ({case})", losses)
        # After each round, so that a long measurement that is cut short leaves what it has.
        store(runs)
    show(runs)
    return None


def store(runs: dict[str, dict[str, list[dict]]]) -> None:
    processor = cpu(Machine())
    machine = {
        "processor": processor.model,
        "bf16": processor.bf16,
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    stored = {
        "machine": machine,
        "torch": torch.__version__,
        "load": os.getloadavg(),
        "tokens": TOKENS,
        "runs": runs,
    }
    target = Path(__file__).with_name("results") / "loss.json"
    target.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def show(runs: dict[str, dict[str, list[dict]]]) -> None:
    """Median and range of times, how many times as fast as all at once (median of paired ratios, range), and memory."""
    for case, variants in runs.items():
        plain = [run["seconds"] for run in variants[VARIANTS[0]]]
        for variant, found in variants.items():
            times = [run["seconds"] for run in found]
            ratios = [a / b for a, b in zip(plain, times, strict=True)]
            size = statistics.median(run["bytes"] for run in found) / 1e6
            print(
                f"{case:<12} {variant:<28} {statistics.median(times) * 1e3:6.0f} ms ({min(times) * 1e3:.0f}-{max(times) * 1e3:.0f})"
                f"  {statistics.median(ratios):5.2f}x ({min(ratios):.2f}-{max(ratios):.2f})  {size:6.0f} MB"
            )


if __name__ == "__main__":
    main()
