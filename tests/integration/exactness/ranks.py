"""What torchrun starts for the exactness tests: one group of ranks that runs many short orders of the real loop, one after another.

python -m torch.distributed.run … ranks.py ORDERS.json
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import cast

import torch

from infini_llama.tasks.runs.heartbeat import Heartbeat
from infini_llama.tasks.runs.run_folder import read_attempt_plan
from infini_llama.tasks.train.worker import trainer
from infini_llama.tasks.train.worker.callbacks import peak_flops
from infini_llama.tasks.train.worker.data.loader import TrainBatches
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from support.leaving import leave_together


class StopAfter:
    """Asks to stop as a signal would, during step number `steps` of this attempt."""

    def __init__(self, steps: int | None) -> None:
        self.left = steps

    @property
    def requested(self) -> bool:
        if self.left is not None:
            self.left -= 1
        return self.left == 0


class Noted(TrainBatches):
    """The real batches; notes which rows this rank takes at which sample number."""

    file: Path

    def micro_batches(self, samples_consumed: int, device: torch.device):
        first = self.plan.rank * self.plan.per_rank
        mine = self.rows(samples_consumed)[first : first + self.plan.per_rank]
        with self.file.open("a") as file:
            file.write(
                json.dumps([samples_consumed, self.plan.rank, mine.tolist()]) + "\n"
            )
        return super().micro_batches(samples_consumed, device)


def main() -> None:
    trainer.TrainBatches = Noted
    # Smaller matrices: measuring the peak takes seconds in fp16.
    peak_flops.SIZE["cpu"] = 64
    torch.set_num_threads(1)
    ranks = Ranks("cpu", "gloo")
    for item in json.loads(Path(sys.argv[1]).read_text()):
        folder = Path(item["attempt_dir"])
        Noted.file = folder / f"rows-{ranks.rank}.jsonl"
        attempt = read_attempt_plan(folder)
        torch._dynamo.reset()
        try:
            stop = cast(trainer.StopRequest, StopAfter(item["stop_after"]))
            one = trainer.Trainer(attempt, ranks, stop, Heartbeat(folder, ranks.rank))
            outcome = f"{one.fit()} {one.state.step}"
        except BaseException:
            outcome = traceback.format_exc()
        (folder / f"outcome-{ranks.rank}").write_text(outcome)
        if not outcome.startswith(("done", "preempted")):
            os._exit(1)
    leave_together(ranks)


if __name__ == "__main__":
    main()
