"""What torchrun starts for test_deepspeed.py: two ranks under every stage of DeepSpeed's ZeRO, beside DDP and one another."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.plan import Precision
from infini_llama.tasks.storage.tensors import model_tensors, state_hash
from infini_llama.tasks.train.worker.callbacks.callback import Update
from infini_llama.tasks.train.worker.checkpointer import save_checkpoint
from infini_llama.tasks.train.worker.data.loader import GlobalBatch
from infini_llama.tasks.train.worker.strategies.optimizer import set_learning_rate
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.strategies.strategy import build_strategy
from infini_llama.tasks.train.worker.trainer import optimizer_step
from support.leaving import leave_together

STEPS, SAVED = 5, 3
ROWS = torch.randint(0, 61, (STEPS, 8, 14), generator=torch.Generator().manual_seed(3))
# Parameters as small as these would stay whole by DeepSpeed's defaults, and all gradients fit into one bucket.
SMALL = {
    "stage3_param_persistence_threshold": 0,
    "reduce_bucket_size": 500,
    "stage3_prefetch_bucket_size": 500,
}


class Training:
    """A model of 61 words under one strategy; the stages as numbers, 0 for DDP. Its three gates a layer are no halves for two."""

    def __init__(self, stage: int, ranks: Ranks, precision: Precision = "fp32") -> None:
        self.ranks = ranks
        parallel: dict[str, Any] = {"parallel": "ddp"}
        if stage:
            parallel = {
                "parallel": "deepspeed",
                "deepspeed_config": {"zero_optimization": SMALL | {"stage": stage}},
            }
        self.train = TrainingConfig(
            max_steps=STEPS,
            warmup_steps=1,
            global_batch_size=8,
            micro_batch_size=2,
            max_grad_norm=0.5,
            **parallel,
        )
        torch.manual_seed(0)
        self.model = Llama(
            LlamaConfig(61, 18, 37, 2, 3, 1, 16, attention="infini", segment_length=4)
        )
        self.strategy = build_strategy(self.model, self.train, precision, 2, ranks)
        self.strategy.accumulate(self.batches(0)[:1], 26)
        self.strategy.discard_gradients()

    def batches(self, step: int) -> list:
        mine = ROWS[step][self.ranks.rank * 4 : self.ranks.rank * 4 + 4]
        return [(rows[:, :-1], rows[:, 1:], None) for rows in mine.split(2)]

    def step(self, step: int, spike: bool = False, scale: float = 1.0) -> Update:
        set_learning_rate(self.strategy.optimizer, self.train, STEPS, step)
        batch = GlobalBatch(self.batches(step), 8 * 13)
        return optimizer_step(
            self.strategy, batch, scale, lambda loss: spike, lambda: False, self.ranks
        )

    def hashes(self) -> list[str]:
        state = self.strategy.tensors()
        return [state_hash(state, part) for part in ("model.", "optimizer.")]


def of_stage(stage: int, ranks: Ranks, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    straight = Training(stage, ranks)
    results = [straight.step(step) for step in range(SAVED)]
    source = save_checkpoint(
        folder / f"stage-{stage}",
        SAVED,
        straight.strategy.tensors(),
        {},
        ranks.saving_group,
    )
    results += [straight.step(step) for step in range(SAVED, STEPS)]
    found["losses"], found["norms"] = (
        [r.loss for r in results],
        [r.grad_norm for r in results],
    )
    found["uninterrupted"] = straight.hashes()

    resumed = Training(stage, ranks)
    resumed.strategy.load_tensors(source)
    for step in range(SAVED, STEPS):
        resumed.step(step)
    found["resumed"] = resumed.hashes()

    before = straight.hashes()
    left_out = straight.step(0, spike=True)
    found["a spike is left out"] = left_out.skipped and straight.hashes() == before
    left_out = straight.step(0, scale=float("inf"))
    found["infinity is left out"] = (
        left_out.skipped and not left_out.finite and straight.hashes() == before
    )
    found["then goes on"] = not straight.step(1).skipped and straight.hashes() != before

    scaled = Training(stage, ranks)
    found["scaled"] = [scaled.step(step, scale=1024.0).loss for step in range(STEPS)]
    found["scaled_hashes"] = scaled.hashes()
    if stage:
        plain = straight.strategy.to_plain_model()
        if plain is not None:
            found["plain"] = state_hash(model_tensors(plain), "model.")
        found["plain_is"] = straight.hashes()[0]
        with straight.strategy.full_parameters():
            found["whole"] = all(
                parameter.numel() for parameter in straight.model.parameters()
            )
        half = Training(stage, ranks, "bf16")
        found["bf16"] = [half.step(step).loss for step in range(STEPS)]
    return found


def main() -> None:
    ranks, folder = Ranks("cpu", "gloo"), Path(sys.argv[1])
    torch.set_num_threads(1)
    stages = [int(stage) for stage in sys.argv[2].split(",")]
    found: dict[str, Any] = {
        str(stage): of_stage(stage, ranks, folder) for stage in stages
    }
    for stage in stages:  # any strategy reads what any other wrote
        for source in stages:
            reader = Training(stage, ranks)
            reader.strategy.load_tensors(
                folder / f"stage-{source}" / f"step-{SAVED:08d}"
            )
            found[f"{stage} from {source}"] = [
                reader.step(step).loss for step in range(SAVED, STEPS)
            ]
    if ranks.is_rank0:
        (folder / "found.json").write_text(json.dumps(found))
    leave_together(ranks)


if __name__ == "__main__":
    main()
