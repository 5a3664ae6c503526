"""The memory that a worker on this machine's CPU has beside its tensors: interpreter, libraries, and what its allocator keeps.

It is measured, by a few steps of a small model in a process of its own; what the tensors of those steps come to is taken off.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig

SMALL = LlamaConfig(4096, 192, 512, 4, 6, 3, 256)
BATCH, STEPS = 8, 10


def process_memory(tensors: int, threads: int, environment: dict[str, str]) -> int | None:
    """Bytes beside `tensors`, those of SMALL's steps; None where the system does not say (not Linux).

    Args:
        environment: the workers' own variables, since some of them choose the allocator.
    """
    if not Path("/proc/self/status").exists():
        return None
    command = [sys.executable, "-m", "infini_llama.tasks.estimate.process", str(threads)]
    made = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300, env=os.environ | environment
    )
    return int(json.loads(made.stdout.splitlines()[-1])) - tensors


def highest_resident() -> int:
    """The most bytes of memory that this process has had at a time."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def main() -> None:
    """A worker's own steps, alone in its process group: a throw-away one, then some that count."""
    import torch

    import infini_llama.tasks.train.worker.rank  # noqa: F401  (all that a worker imports)
    from infini_llama.model.llama import Llama
    from infini_llama.tasks.train.worker.optimizer import build_optimizer
    from infini_llama.tasks.train.worker.step import accumulate, train_step
    from infini_llama.tasks.train.worker.strategies.native import LossModule, distribute
    from infini_llama.tasks.train.worker.strategies.ranks import Ranks

    torch.set_num_threads(int(sys.argv[1]))
    train = TrainingConfig().model_dump(mode="json")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone)
    ranks = Ranks("cpu", "gloo")
    model = Llama(SMALL)
    module = LossModule(model)
    wrapped = distribute(module, train, ranks)
    optimizer = build_optimizer(model, train)
    autocast = torch.autocast("cpu", enabled=False)

    def batches(count: int) -> list:
        rows = torch.randint(0, SMALL.vocab_size, (count, BATCH, SMALL.max_position_embeddings + 1))
        return [(row[:, :-1], row[:, 1:]) for row in rows]

    tokens = BATCH * SMALL.max_position_embeddings
    accumulate(wrapped, batches(1), tokens, ranks, autocast)
    optimizer.zero_grad(set_to_none=True)
    for _ in range(STEPS):
        train_step(wrapped, optimizer, batches(2), 2 * tokens, 1.0, ranks, autocast, lambda: False)
    ranks.leave()
    print(json.dumps(highest_resident()))


if __name__ == "__main__":
    main()
