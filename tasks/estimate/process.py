"""The memory that a worker on this machine's CPU has beside its tensors: interpreter, libraries, and what its allocator keeps.

It is measured, by a few steps of a small model in a process of its own; what the tensors of those steps come to is taken off.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from model.config import LlamaConfig

SMALL = LlamaConfig(4096, 192, 512, 4, 6, 3, 256)
BATCH, STEPS = 8, 10


def process_memory(tensors: int, threads: int, environment: dict[str, str]) -> int | None:
    """Bytes beside `tensors`, those of SMALL's steps; None where the system does not say (not Linux).

    Args:
        environment: the workers' own variables, since some of them choose the allocator.
    """
    if not Path("/proc/self/status").exists():
        return None
    command = [sys.executable, "-m", "tasks.estimate.process", str(threads)]
    made = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300, env=os.environ | environment
    )
    return int(json.loads(made.stdout.splitlines()[-1])) - tensors


def highest_resident() -> int:
    """The most bytes of memory that this process has had at a time."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def main() -> None:
    import torch

    import tasks.train.worker.rank  # noqa: F401  (what a worker imports)
    from model.llama import Llama

    torch.set_num_threads(int(sys.argv[1]))
    model = Llama(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(STEPS):
        for _ in range(2):
            ids = torch.randint(0, SMALL.vocab_size, (BATCH, SMALL.max_position_embeddings + 1))
            model.loss(ids[:, :-1], ids[:, 1:])[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(json.dumps(highest_resident()))


if __name__ == "__main__":
    main()
