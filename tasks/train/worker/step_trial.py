"""Run once per worker: how long a training step takes under the settings of a plan, on random tokens."""

import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.train.worker.data.prefetch import GlobalBatch
from infini_llama.tasks.train.worker.initial_model import build_model
from infini_llama.tasks.train.worker.optimizer import build_optimizer
from infini_llama.tasks.train.worker.strategies.compiling import Compiled
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.strategies.strategy import build_strategy
from infini_llama.tasks.train.worker.trainer import optimizer_step


class StepTrialResult(Record):
    """Seconds of the first step, and the median of the other `steps`."""

    first: float
    step: float
    steps: int


def try_steps(
    train: TrainingConfig, plan: EnvironmentPlan, model: LlamaConfig, length: int, seconds: float
) -> StepTrialResult:
    """Time the trainer's own steps of one micro-batch.

    Args:
        length: tokens of a sequence.
        seconds: time to spend after the first step.
    """
    torch.set_num_threads(plan.threads)
    ranks = Ranks(plan.device, plan.distributed_backend)
    ranks.use_context_parallel(train.context_parallel)
    llama = build_model(model, train, plan, ranks.device)
    strategy = build_strategy(llama, train, plan.precision, plan.micro_batch_size, ranks, build_optimizer)
    if plan.compile != "off":
        Compiled(strategy.module, llama, plan.compile).switch_on()
    shape = (plan.micro_batch_size, length)
    inputs, labels = (torch.randint(model.vocab_size, shape, device=ranks.device) for _ in range(2))
    batch = GlobalBatch([(inputs, labels)], labels.numel() * ranks.data_world_size)

    def step() -> float:
        started = time.perf_counter()
        optimizer_step(strategy, batch, 1.0, lambda loss: False, lambda: False, ranks)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    first = step()
    # All ranks have to make the same number of steps, so the first one decides it.
    count = torch.tensor([max(3, min(20, int(seconds / max(first, 1e-3))))], device=ranks.device)
    dist.broadcast(count, 0)
    times = [step() for _ in range(int(count))]
    ranks.leave()
    return StepTrialResult(first=first, step=statistics.median(times), steps=len(times))


def main(case: str) -> None:
    """Run the trial that `tuning.trials.steps` describes, and print its result as the last line."""
    given: dict[str, Any] = json.loads(case)
    order = given["order"]
    found = try_steps(
        TrainingConfig.model_validate(order["config"]["train"]),
        EnvironmentPlan.from_json(order["plan"]),
        LlamaConfig.from_dict(order["model"]),
        given["length"],
        given["seconds"],
    )
    print("\n" + found.model_dump_json())
