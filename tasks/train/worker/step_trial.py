"""Run once per worker: how long a training step takes under the settings of a plan, on random tokens."""

import json
import statistics
import time

import torch
import torch.distributed as dist

from infini_llama.tasks.records.job import StepTrial, StepTrialResult
from infini_llama.tasks.train.worker.data.prefetch import GlobalBatch
from infini_llama.tasks.train.worker.initial_model import build_model
from infini_llama.tasks.train.worker.optimizer import build_optimizer
from infini_llama.tasks.train.worker.strategies.compiling import Compiled
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.strategies.strategy import build_strategy
from infini_llama.tasks.train.worker.trainer import optimizer_step


def try_steps(trial: StepTrial) -> StepTrialResult:
    """Time the trainer's own steps."""
    train, plan = trial.train, trial.plan
    torch.set_num_threads(plan.threads)
    ranks = Ranks(plan.device, plan.distributed_backend)
    ranks.use_context_parallel(train.context_parallel)
    llama = build_model(trial.model, train, plan, ranks.device)
    half_weights = plan.half_weights == "on"
    strategy = build_strategy(llama, train, plan.precision, plan.micro_batch_size, ranks, build_optimizer, half_weights)
    if plan.compile != "off":
        strategy.compiled = Compiled(strategy.module, llama, plan.compile, plan.compile_mode)
        strategy.compiled.switch_on()
    shape = (plan.micro_batch_size, trial.sequence_length)
    inputs, labels = (torch.randint(trial.model.vocab_size, shape, device=ranks.device) for _ in range(2))
    targets = labels.numel() * trial.micro_batches * ranks.data_world_size
    batch = GlobalBatch([(inputs, labels)] * trial.micro_batches, targets)

    def step() -> float:
        started = time.perf_counter()
        optimizer_step(strategy, batch, 1.0, lambda loss: False, lambda: False, ranks)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    first = step()
    # All ranks have to make the same number of steps, so the first one decides it.
    count = torch.tensor([max(3, min(20, int(trial.seconds / max(first, 1e-3))))], device=ranks.device)
    dist.broadcast(count, 0)
    times = [step() for _ in range(int(count))]
    ranks.leave()
    return StepTrialResult(first=first, step=statistics.median(times), steps=len(times))


def main(case: str) -> None:
    """Run the trial that `tuning.trials.steps` describes, and print its result as the last line."""
    print("\n" + try_steps(StepTrial.from_json(json.loads(case))).model_dump_json())
