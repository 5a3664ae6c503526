"""A step of a few ranks by torch alone, under torchrun: the lower bound of a run's start and end.

    torchrun --standalone --nproc-per-node=2 benchmarks/startup_torch.py FILE

Its first rank creates FILE after the step. It imports what the same model, optimizer and DDP
import in a run: torch.distributed's own use of torch._dynamo among it.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text("step", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
