"""One lane of benchmarks/training.py: python training_peer.py PROGRAM ORDER, then a line on standard input before each turn."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig, flops_per_token
from infini_llama.model.hf import config_to_hf
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.train.worker.callbacks.peak_flops import peak_flops
from infini_llama.tasks.train.worker.data.loader import Batch, GlobalBatch
from infini_llama.tasks.train.worker.strategies.compiling import Compiled
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.strategies.strategy import build_strategy
from infini_llama.tasks.train.worker.trainer import optimizer_step

ROWS, LENGTH, RATE = 4, 512, 1e-3
# Of a step's profile, by names of functions that are called or call.
PARTS = {
    "optimizer and clipping": ("Optimizer.step", "fused_adamw", "linalg_vector_norm"),
    "compiled: norms, elementwise and loss": ("CompiledFxGraph",),
    "loss": ("cross_entropy", "NllLoss", "LogSoftmax", "nll_loss", "log_softmax"),
}
SIZES = {"s": (256, 768, 6, 8, 4), "m": (512, 1408, 8, 8, 4)}
# Rows [4, 513] of tokens to the loss before the update.
Step = Callable[[torch.Tensor], torch.Tensor | float]


def autocast(order: dict[str, Any]) -> torch.autocast:
    return torch.autocast(
        "cpu", dtype=torch.bfloat16, enabled=order["plan"]["precision"] == "bf16"
    )


class Turns:
    """Waits for its turn, and prints what it took."""

    def __init__(self, order: dict[str, Any], config: LlamaConfig) -> None:
        self.order, self.flops, self.losses = order, flops_per_token(config, LENGTH), []
        self.matmul_flops = 0.0
        self.settings: dict[str, Any] = {}  # of a peer, as stored beside its times

    def begin(self) -> None:
        sys.stdin.readline()
        half = self.order["plan"]["precision"] == "bf16"
        self.matmul_flops = peak_flops(
            torch.device("cpu"), torch.bfloat16 if half else torch.float32
        )
        self.losses, self.wall, self.cpu = [], time.perf_counter(), time.process_time()

    def end(self, then: Callable[[], dict[str, Any]] = dict) -> None:
        """Print what the turn took, and what `then` returns after it."""
        took = {
            "wall": time.perf_counter() - self.wall,
            "cpu": time.process_time() - self.cpu,
            "losses": self.losses,
        }
        known = {
            "matmul_flops": self.matmul_flops,
            "flops_per_token": self.flops,
            "settings": self.settings,
        }
        print(json.dumps(took | known | then()), flush=True)


def batch_of(number: int, vocabulary: int) -> torch.Tensor:
    """The rows of step `number`, the same for all; frequent tokens are few, as in a text."""
    generator = torch.Generator().manual_seed(number)
    return (torch.rand(ROWS, LENGTH + 1, generator=generator) ** 4 * vocabulary).long()


def take_turns(step: Step, turns: Turns, profiled: bool) -> None:
    order, number = turns.order, 0
    for turn in range(order["turns"]):
        turns.begin()
        for _ in range(order["steps"]):
            turns.losses.append(float(step(batch_of(number, order["vocabulary"]))))
            number += 1
        last = profiled and turn == order["turns"] - 1
        turns.end(
            lambda last=last: (
                {"profile": profile_of(step, batch_of(0, order["vocabulary"]))}
                if last
                else {}
            )
        )


def profile_of(step: Step, rows: torch.Tensor) -> dict[str, dict[str, float]]:
    """Share of a further step's own time of each part, and of each of the twelve costliest functions."""
    with torch.profiler.profile() as profiler:
        step(rows)
    parts, functions = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        parts[part_of(event)] += event.self_cpu_time_total
        functions[event.name[:60]] += event.self_cpu_time_total
    total = sum(parts.values())
    return {
        "parts": {name: time / total for name, time in parts.most_common()},
        "functions": {name: time / total for name, time in functions.most_common(12)},
    }


def part_of(event: Any) -> str:
    """Attention with its products, the other products, or what the function and those that call it are named after."""
    callers = [event.name]
    while event := event.cpu_parent:
        callers.append(event.name)
    if any(
        name in caller
        for caller in callers
        for name in ("blocked_attention", "scaled_dot_product")
    ):
        return "attention"
    if callers[0] in (
        "aten::mm",
        "aten::addmm",
        "aten::addmm_",
        "aten::bmm",
        "aten::baddbmm",
    ):
        return "products"
    for part, names in PARTS.items():
        if any(name in caller for caller in callers for name in names):
            return part
    if callers[0] in ("aten::copy_", "aten::cat", "aten::_cat", "aten::clone"):
        return "copies and casts"
    return "norms and elementwise" if callers[0].startswith("aten::") else "dispatch"


def plain(
    module: nn.Module,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    order: dict[str, Any],
) -> Step:
    """The loop that tutorials have, with torch's own defaults."""
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0
    )

    def step(rows: torch.Tensor) -> float:
        with autocast(order):
            loss = loss_of(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def ours(model: Llama, order: dict[str, Any]) -> Step:
    """The workers' own step under the plan."""
    one = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    os.environ.update(one)
    plan = EnvironmentPlan.model_validate(order["plan"])
    ranks = Ranks("cpu", "gloo")
    model.loss_chunk = plan.loss_chunk
    train = TrainingConfig(learning_rate=RATE, weight_decay=0.0)
    strategy = build_strategy(model, train, plan.precision, ROWS, ranks)
    if order["compiled"]:
        Compiled(strategy.module, model, "whole").switch_on()

    def step(rows: torch.Tensor) -> float:
        batch = GlobalBatch([Batch(rows[:, :-1], rows[:, 1:])], ROWS * LENGTH)
        return optimizer_step(
            strategy, batch, 1.0, lambda loss: False, lambda: False, ranks
        ).loss

    return step


def litgpt(model: Llama, config: LlamaConfig, order: dict[str, Any]) -> Step:
    sys.path.append(order["litgpt"])
    from litgpt.config import Config  # pyright: ignore[reportMissingImports]
    from litgpt.model import GPT  # pyright: ignore[reportMissingImports]
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama  # pyright: ignore[reportMissingImports]
    from litgpt.utils import chunked_cross_entropy  # pyright: ignore[reportMissingImports]

    theirs = GPT(
        Config(
            block_size=LENGTH,
            vocab_size=config.vocab_size,
            padded_vocab_size=config.vocab_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            n_query_groups=config.num_key_value_heads,
            n_embd=config.hidden_size,
            intermediate_size=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
        )
    )
    weights: dict[str, Any] = {}
    copy_weights_hf_llama(theirs.config, {}, weights, dict(model.state_dict()))
    theirs.load_state_dict({name: value.clone() for name, value in weights.items()})
    forward = torch.compile(theirs) if order["compiled"] else theirs
    return plain(
        theirs,
        lambda rows: chunked_cross_entropy(
            forward(rows[:, :-1]), rows[:, 1:], chunk_size=128
        ),
        order,
    )


def transformers_model(model: Llama, config: LlamaConfig) -> Any:
    import transformers

    settings = transformers.LlamaConfig(
        **{**config_to_hf(config), "torch_dtype": "float32"}
    )
    theirs = transformers.LlamaForCausalLM(settings)
    theirs.load_state_dict(model.state_dict())
    return theirs.train()


def trainer(theirs: Any, turns: Turns) -> None:
    """Trainer's own loop, which waits for its turn between steps."""
    import transformers

    order = turns.order

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return ROWS * order["steps"] * order["turns"]

        def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
            row = batch_of(at // ROWS, order["vocabulary"])[at % ROWS]
            # Trainer's model shifts labels itself; the last token is only ever a label
            return {"input_ids": row[:-1], "shift_labels": row[1:], "labels": row[:-1]}

    class Waiting(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % order["steps"] == 0:
                turns.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % order["steps"] == 0:
                turns.losses = losses[-order["steps"] :]
                turns.end()

    losses: list[float] = []

    class Noting(transformers.Trainer):
        def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **named)
            losses.append(float(loss))
            return loss

        def _get_train_sampler(
            self, train_dataset: Any = None
        ) -> torch.utils.data.Sampler:
            return torch.utils.data.SequentialSampler(Rows())

    settings = transformers.TrainingArguments(
        output_dir=f"{order['home']}/trainer",
        max_steps=order["steps"] * order["turns"],
        per_device_train_batch_size=ROWS,
        learning_rate=RATE,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=order["plan"]["precision"] == "bf16",
        torch_compile=order["compiled"],
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    turns.settings = {
        "attention": theirs.config._attn_implementation,
        "optimizer": str(settings.optim),
        "torch_compile": settings.torch_compile,
        "transformers": transformers.__version__,
    }
    Noting(theirs, settings, train_dataset=Rows(), callbacks=[Waiting()]).train()


def main() -> None:
    name, order = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(order["threads"])
    hidden, inner, layers, heads, kv = SIZES[order["size"]]
    config = LlamaConfig(
        order["vocabulary"],
        hidden,
        inner,
        layers,
        heads,
        kv,
        LENGTH,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    backend = order["plan"]["attention_backend"] if name == "ours" else "sdpa"
    model, turns = Llama(config, backend), Turns(order, config)
    if name == "ours":
        take_turns(ours(model, order), turns, profiled=True)
    elif name == "litgpt":
        turns.settings = {
            "attention": "sdpa",
            "optimizer": "AdamW",
            "loss chunk": 128,
            "compile": order["compiled"],
        }
        take_turns(litgpt(model, config, order), turns, profiled=False)
    else:
        trainer(transformers_model(model, config), turns)


if __name__ == "__main__":
    main()
