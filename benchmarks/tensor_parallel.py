"""What sharing a wide model saves each rank: a training step's memory and arithmetic by `train.tensor_parallel`, on a CPU.

    .venv/bin/python benchmarks/tensor_parallel.py [--width 1024] [--sizes 1 2 4] [--rounds 3]

An Infini-Llama (linear, segments of 128; 2 layers, inner width four times the width, heads of 64, vocabulary 8192) makes two AdamW
steps over one row of 512 tokens, fp32, one thread a rank, gloo. Memory is what the fullest rank's resident size was at most during the
steps, over what it was before the model was built; seconds are the processor time of the busiest rank's second step, so that other work
on the machine does little to them. Every round is a torchrun of its own. The result goes to benchmarks/results/tensor_parallel.json.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

SEGMENT, VOCABULARY, LAYERS, HEAD, ROW = 128, 8192, 2, 64, 512
RESULT = Path(__file__).parent / "results/tensor_parallel.json"


def megabytes(name: str) -> float:
    """VmRSS, the resident size now, or VmHWM, its highest since that was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def rank(width: int) -> None:
    """One of torchrun's workers, all of which share the model; the first prints what they found."""
    import torch
    import torch.distributed as dist

    from infini_llama.configs.schema import TrainingConfig
    from infini_llama.model.config import LlamaConfig
    from infini_llama.model.llama import Llama
    from infini_llama.tasks.train.worker.optimizer import build_optimizer, set_learning_rate
    from infini_llama.tasks.train.worker.step import train_step
    from infini_llama.tasks.train.worker.strategies.native import LossModule, distribute
    from infini_llama.tasks.train.worker.strategies.ranks import Ranks

    torch.set_num_threads(1)
    ranks = Ranks("cpu", "gloo")
    ranks.share_model(ranks.world_size)
    heads = width // HEAD
    config = LlamaConfig(
        VOCABULARY, width, 4 * width, LAYERS, heads, heads, ROW, attention="infini", segment_length=SEGMENT
    )
    train = TrainingConfig().model_dump(mode="json")
    torch.manual_seed(0)
    batch = torch.randint(VOCABULARY, (1, ROW + 1))
    before, seconds = megabytes("VmRSS"), 0.0
    model = Llama(config)
    module = distribute(LossModule(model), train, ranks)
    optimizer = build_optimizer(model, train)
    Path("/proc/self/clear_refs").write_text("5")  # the whole model that was built first is no part of a step
    for _ in range(2):
        began = time.process_time()
        set_learning_rate(optimizer, train, 1)
        autocast = torch.autocast("cpu", enabled=False)
        train_step(module, optimizer, [(batch[:, :-1], batch[:, 1:])], ROW, 1.0, ranks, autocast, lambda: False)
        seconds = time.process_time() - began
    worst = torch.tensor([megabytes("VmHWM") - before, seconds])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if ranks.is_first:
        print(json.dumps([sum(value.numel() for value in model.parameters()), *worst.tolist()]), flush=True)
    ranks.leave()


def measure(width: int, size: int) -> tuple[int, float, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", __file__]
    root = str(Path(__file__).parents[1] / "src")
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, "--rank", "--width", str(width)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    parameters, memory, seconds = json.loads(done.stdout.splitlines()[-1])
    return parameters, memory, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        return rank(asked.width)
    found: dict[int, list[tuple[int, float, float]]] = {size: [] for size in asked.sizes}
    for _ in range(asked.rounds):
        for size in asked.sizes:
            found[size].append(measure(asked.width, size))
    rows = []
    for size, rounds in found.items():
        row: dict = {"tensor_parallel": size, "parameters": rounds[0][0]}
        for at, name in ((1, "megabytes"), (2, "seconds")):
            values = [each[at] for each in rounds]
            row |= {name: statistics.median(values), f"{name}_from": min(values), f"{name}_to": max(values)}
        print(json.dumps(row), flush=True)
        rows.append(row)
    machine = {"platform": platform.platform(), "cores": len(os.sched_getaffinity(0))}
    RESULT.write_text(
        json.dumps({"width": asked.width, "rounds": asked.rounds, "machine": machine, "rows": rows}, indent=1)
    )
    return None


if __name__ == "__main__":
    main()
