"""What torchrun starts for test_compiling_ranks.py: two ranks under DDP, of which the second one cannot compile."""

import sys
from pathlib import Path

import torch

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.train.worker.data.loader import Batch
from infini_llama.tasks.train.worker.strategies.compiling import compile_if_it_agrees
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.strategies.strategy import build_strategy
from support.leaving import leave_together


def main(run_dir: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks("cpu", "gloo", 60.0)

    def compile_layer(forward, dynamic):
        def fail(*arguments):
            raise RuntimeError("no working C++ compiler")

        return forward if ranks.is_rank0 else fail

    torch.compile = compile_layer
    torch.manual_seed(0)
    model = Llama(LlamaConfig(61, 16, 32, 2, 2, 1, 16))
    train = TrainingConfig(micro_batch_size=2, max_steps=4, warmup_steps=1)
    strategy = build_strategy(model, train, "fp32", 2, ranks)
    ids = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids[:, :-1], ids[:, 1:])

    def first_batch() -> float:
        return strategy.accumulate([batch], 48).item()

    first_batch()
    strategy.discard_gradients()
    plan = EnvironmentPlan.model_validate_json((run_dir / "plan.json").read_bytes())
    compile_if_it_agrees(
        strategy.module, strategy.model, plan, first_batch, ranks, run_dir
    )
    loss = first_batch()
    is_eager = "forward" not in strategy.model.model.layers[0].__dict__
    (run_dir / f"rank-{ranks.rank}").write_text(f"{is_eager} {loss}")
    leave_together(ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
