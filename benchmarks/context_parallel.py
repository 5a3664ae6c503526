"""What sharing a long row saves each rank: a training step's memory and arithmetic by `train.context_parallel`, on a CPU.

    .venv/bin/python benchmarks/context_parallel.py [--length 32768] [--sizes 1 2 4] [--rounds 3]

Infini-attention (linear and delta_bounded, segments of 512; 2 layers, width 256, vocabulary 256) runs forward and backward over one
row, fp32, one thread a rank, gloo. Memory is the growth of the fullest rank's peak resident size; seconds are the processor time of
the busiest rank's second step of two, so that other work on the machine does little to them. Every round is a torchrun of its own. The
result goes to benchmarks/results/context_parallel.json, unless the losses of two sizes differ by more than 1e-3.
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

from agreement import require_close

SEGMENT, VOCABULARY, WIDTH, LAYERS, HEADS, INNER = 512, 256, 256, 2, 4, 682
RESULT = Path(__file__).parent / "results/context_parallel.json"


def rank(update: str, length: int) -> None:
    """One of torchrun's workers, all of which share the row; the first prints what they found."""
    import torch
    import torch.distributed as dist

    from infini_llama.model.config import LlamaConfig
    from infini_llama.model.llama import Llama
    from infini_llama.tasks.train.worker.strategies.native import LossModule
    from infini_llama.tasks.train.worker.strategies.ranks import Ranks

    torch.set_num_threads(1)
    ranks = Ranks("cpu", "gloo")
    ranks.use_context_parallel(ranks.world_size)
    config = LlamaConfig(
        VOCABULARY,
        WIDTH,
        INNER,
        LAYERS,
        HEADS,
        HEADS,
        length,
        attention="infini",
        segment_length=SEGMENT,
        memory_update=update,  # type: ignore[arg-type]
    )
    torch.manual_seed(0)
    module = LossModule(Llama(config), ranks.context)
    ids = torch.randint(VOCABULARY, (1, length + 1))
    total = torch.zeros(())
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        began = time.process_time()
        total = module(ids[:, :-1], ids[:, 1:]) / length
        total.backward()
        seconds = time.process_time() - began
    worst = torch.tensor(
        [(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds]
    )
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    loss = total.detach().clone()
    dist.all_reduce(loss)
    if ranks.is_rank0:
        print(json.dumps([*worst.tolist(), loss.item()]), flush=True)
    ranks.leave()


def measure(update: str, length: int, size: int) -> tuple[float, float, float]:
    """Megabytes, seconds and loss."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={size}",
        __file__,
    ]
    root = str(Path(__file__).parents[1] / "src")
    environment = os.environ | {
        "PYTHONPATH": root,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [*command, "--rank", update, "--length", str(length)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    megabytes, seconds, loss = json.loads(done.stdout.splitlines()[-1])
    return megabytes, seconds, loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        return rank(asked.rank, asked.length)
    rows = []
    cases = [
        (update, size) for update in ("linear", "delta_bounded") for size in asked.sizes
    ]
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {
        case: [] for case in cases
    }
    for _ in range(asked.rounds):
        for case in cases:
            found[case].append(measure(case[0], asked.length, case[1]))
    for update in ("linear", "delta_bounded"):
        losses = {
            f"{size} workers": [run[2] for run in found[update, size]]
            for size in asked.sizes
        }
        require_close(f"the losses ({update})", losses)
    for (update, size), rounds in found.items():
        row = {"update": update, "context_parallel": size}
        for name, values in zip(
            ("megabytes", "seconds", "loss"), zip(*rounds, strict=True), strict=True
        ):
            row |= {
                name: statistics.median(values),
                f"{name}_from": min(values),
                f"{name}_to": max(values),
            }
        print(json.dumps(row), flush=True)
        rows.append(row)
    machine = {"platform": platform.platform(), "cores": len(os.sched_getaffinity(0))}
    RESULT.write_text(
        json.dumps(
            {
                "length": asked.length,
                "rounds": asked.rounds,
                "machine": machine,
                "rows": rows,
            },
            indent=1,
        )
    )
    return None


if __name__ == "__main__":
    main()
