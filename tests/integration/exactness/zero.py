"""What torchrun starts for test_deepspeed.py: two ranks under every stage of DeepSpeed's ZeRO, beside DDP and one another."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from infini_llama.configs.deepspeed import engine_settings
from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker import checkpoint
from infini_llama.tasks.train.worker.optimizer import build_optimizer, set_learning_rate
from infini_llama.tasks.train.worker.step import StepResult, accumulate, train_step
from infini_llama.tasks.train.worker.strategies.deepspeed import Zero
from infini_llama.tasks.train.worker.strategies.native import LossModule, distribute
from infini_llama.tasks.train.worker.strategies.ranks import Ranks

STEPS, SAVED = 5, 3
ROWS = torch.randint(0, 61, (STEPS, 8, 14), generator=torch.Generator().manual_seed(3))
# Parameters as small as these would stay whole by DeepSpeed's defaults, and all gradients fit into one bucket.
SMALL = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500, "stage3_prefetch_bucket_size": 500}


class Training:
    """A model of 61 words under one strategy; the stages as numbers, 0 for DDP. Its three gates a layer are no halves for two."""

    def __init__(self, stage: int, ranks: Ranks, precision: str = "fp32") -> None:
        self.ranks, self.stage = ranks, stage
        parallel: dict[str, Any] = {"parallel": "ddp"}
        if stage:
            parallel = {"parallel": "deepspeed", "deepspeed_config": {"zero_optimization": SMALL | {"stage": stage}}}
        config = TrainingConfig(
            max_steps=STEPS, warmup_steps=1, global_batch_size=8, micro_batch_size=2, max_grad_norm=0.5, **parallel
        )
        self.train = config.model_dump(mode="json")
        torch.manual_seed(0)
        self.model = Llama(LlamaConfig(61, 18, 37, 2, 3, 1, 16, attention="infini", segment_length=4))
        module = LossModule(self.model)
        self.autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != "fp32")
        self.zero = None
        if stage:
            self.optimizer = build_optimizer(self.model, self.train)
            settings = engine_settings(self.train, precision, ranks.world_size)
            self.module = self.zero = Zero(module, self.model, self.optimizer, settings, ranks, self.autocast)
            self.autocast = torch.autocast("cpu", enabled=False)
        else:
            self.module = distribute(module, self.train, ranks)
            self.optimizer = build_optimizer(self.model, self.train)
        accumulate(self.module, self.batches(0)[:1], 26, ranks, self.autocast)
        if self.zero:
            self.zero.forget()
        self.optimizer.zero_grad(set_to_none=True)

    def batches(self, step: int) -> list:
        mine = ROWS[step][self.ranks.rank * 4 : self.ranks.rank * 4 + 4]
        return [(rows[:, :-1], rows[:, 1:], None) for rows in mine.split(2)]

    def step(self, step: int, spike: bool = False, scale: float = 1.0) -> StepResult:
        set_learning_rate(self.optimizer, self.train, step)
        clip, targets = self.train["max_grad_norm"], 8 * 13
        return train_step(
            self.module,
            self.optimizer,
            self.batches(step),
            targets,
            clip,
            self.ranks,
            self.autocast,
            lambda: False,
            lambda loss: spike,
            scale,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        if self.zero:
            return self.zero.tensors()
        return checkpoint.tensors(self.model, self.optimizer)

    def hashes(self) -> list[str]:
        state = self.tensors()
        return [checkpoint.state_hash(state, part) for part in ("model.", "optimizer.")]

    def load(self, source: Path) -> None:
        if not self.zero:
            checkpoint.prime(self.optimizer)
        state = self.tensors()
        checkpoint.load(source, state)
        if self.zero:
            self.zero.take(state)


def of_stage(stage: int, ranks: Ranks, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    straight = Training(stage, ranks)
    results = [straight.step(step) for step in range(SAVED)]
    source = checkpoint.save(folder / f"stage-{stage}", SAVED, straight.tensors(), {}, ranks.saving_group)
    results += [straight.step(step) for step in range(SAVED, STEPS)]
    found["losses"], found["norms"] = [r.loss for r in results], [r.grad_norm for r in results]
    found["uninterrupted"] = straight.hashes()

    resumed = Training(stage, ranks)
    resumed.load(source)
    for step in range(SAVED, STEPS):
        resumed.step(step)
    found["resumed"] = resumed.hashes()

    before = straight.hashes()
    left_out = straight.step(0, spike=True)
    found["a spike is left out"] = left_out.skipped and straight.hashes() == before
    left_out = straight.step(0, scale=float("inf"))
    found["infinity is left out"] = left_out.skipped and not left_out.finite and straight.hashes() == before
    found["then goes on"] = not straight.step(1).skipped and straight.hashes() != before

    scaled = Training(stage, ranks)
    found["scaled"] = [scaled.step(step, scale=1024.0).loss for step in range(STEPS)]
    found["scaled_hashes"] = scaled.hashes()
    if stage:
        assert straight.zero is not None
        alone = straight.zero.unhooked(straight.model, ranks)
        if ranks.is_first:
            same = {f"model.{name}": parameter.detach() for name, parameter in alone.named_parameters()}
            found["unhooked"] = checkpoint.state_hash(same, "model.")
        found["unhooked_is"] = straight.hashes()[0]
        with straight.zero.whole():
            found["whole"] = all(parameter.numel() for parameter in straight.model.parameters())
        half = Training(stage, ranks, "bf16")
        found["bf16"] = [half.step(step).loss for step in range(STEPS)]
    return found


def main() -> None:
    ranks, folder = Ranks("cpu", "gloo"), Path(sys.argv[1])
    torch.set_num_threads(1)
    stages = [int(stage) for stage in sys.argv[2].split(",")]
    found: dict[str, Any] = {str(stage): of_stage(stage, ranks, folder) for stage in stages}
    for stage in stages:  # any strategy reads what any other wrote
        for source in stages:
            reader = Training(stage, ranks)
            reader.load(folder / f"stage-{source}" / f"step-{SAVED:08d}")
            found[f"{stage} from {source}"] = [reader.step(step).loss for step in range(SAVED, STEPS)]
    if ranks.is_first:
        (folder / "found.json").write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main()
