"""Tokens per second and MFU of training steps: ours and peers at equal work, beside two ceilings measured in the same call."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from tempfile import mkdtemp
from typing import Any, NamedTuple

import torch
from case import (
    VENDOR_PEAK,
    Case,
    Row,
    copy_bandwidth,
    half,
    model_config,
    one_rank,
    peak_bytes,
    precision,
    seconds_of,
    tokens_of,
)
from torch import nn

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig, flops_per_token
from infini_llama.model.hf import config_to_hf
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.callbacks.peak_flops import peak_flops
from infini_llama.tasks.train.worker.data.loader import Batch, GlobalBatch
from infini_llama.tasks.train.worker.strategies.compiling import Compiled
from infini_llama.tasks.train.worker.strategies.strategy import build_strategy
from infini_llama.tasks.train.worker.trainer import optimizer_step

ACCUMULATION = 2  # micro-batches of a step
TRAINER_STEPS = 10  # of a call, so that the start of its loop counts little
Step = Callable[[], Any]


def ceilings(device: str, rehearse: bool) -> list[Row]:
    """What this device copies and multiplies at most, now."""
    multiplied = peak_flops(torch.device(device), half(device))
    row: Row = {
        "copy GB/s": copy_bandwidth(device, rehearse) / 1e9,
        "bf16 matmul TFLOP/s": multiplied / 1e12,
    }
    return [row | {"vendor TFLOP/s": (vendor_peak(device) or 0.0) / 1e12 or None}]


def vendor_peak(device: str) -> float | None:
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for part, peak in VENDOR_PEAK.items() if part in name), None)


def rows_of(
    config: LlamaConfig, batch: int, length: int, device: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of a step, random tokens, the same for all."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(
        config.vocab_size, (ACCUMULATION, batch, length + 1), generator=generator
    ).to(device)
    return [(row[:, :-1], row[:, 1:]) for row in rows]


class Switches(NamedTuple):
    """What the plan of a GPU sets, each to be measured by itself. vocabulary: (tokens, multiple that they are padded to)."""

    compile: str = "block"
    loss_chunk: int = 4096
    vocabulary: tuple[int, int] | None = None


AS_PLANNED = Switches()


def ours(
    config: LlamaConfig,
    batch: int,
    length: int,
    device: str,
    switches: Switches = AS_PLANNED,
) -> Step:
    """`optimizer_step` of the workers."""
    torch.set_float32_matmul_precision("highest")
    ranks = one_rank(device)
    if switches.vocabulary:
        tokens, multiple = switches.vocabulary
        config = replace(
            config,
            vocab_size=min(tokens, config.vocab_size - 12),
            pad_vocab_to_multiple_of=multiple,
        )
    with ranks.device:  # where a billion parameters are drawn in no time
        model = Llama(config)
    model.loss_chunk = switches.loss_chunk if device == "cuda" else 0
    strategy = build_strategy(model, TrainingConfig(), precision(device), batch, ranks)
    if switches.compile != "off":
        Compiled(strategy.module, model, switches.compile).switch_on()
    micro_batches = rows_of(config, batch, length, device)
    data = GlobalBatch(
        [Batch(*rows) for rows in micro_batches], ACCUMULATION * batch * length
    )
    return lambda: optimizer_step(
        strategy, data, 1.0, lambda loss: False, lambda: False, ranks
    )


def loop(
    module: nn.Module,
    loss_of: Callable[..., torch.Tensor],
    micro_batches: list[Any],
    device: str,
) -> Step:
    """The loop that tutorials have, with a fused AdamW."""
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True
    )

    def step() -> float:
        total = torch.zeros((), device=device)
        for inputs, labels in micro_batches:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = loss_of(inputs, labels) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item()

    return step


def plain(config: LlamaConfig, batch: int, length: int, device: str) -> Step:
    """Our model in a plain loop of torch, compiled as a whole, all logits at once (as nanochat trains its own)."""
    with torch.device(device):
        model = Llama(config)
    forward = torch.compile(model, dynamic=False)

    def loss_of(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            forward(inputs).float().flatten(0, 1), labels.flatten()
        )

    return loop(model, loss_of, rows_of(config, batch, length, device), device)


def theirs(
    config: LlamaConfig, batch: int, length: int, device: str, compiled: bool = True
) -> Step:
    """transformers' Llama in the same plain loop."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    settings: dict[str, Any] = {**config_to_hf(config), "attn_implementation": "sdpa"}
    with torch.device(device):
        model: Any = LlamaForCausalLM(TheirConfig(**settings))
    model.train()
    forward = torch.compile(model, dynamic=False) if compiled else model

    def loss_of(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = forward(input_ids=inputs, use_cache=False).logits
        return nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten()
        )

    return loop(model, loss_of, rows_of(config, batch, length, device), device)


def trainer(config: LlamaConfig, batch: int, length: int, device: str) -> Step:
    """transformers' Trainer: a call trains TRAINER_STEPS steps."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    fields: dict[str, Any] = {**config_to_hf(config), "attn_implementation": "sdpa"}
    model = LlamaForCausalLM(TheirConfig(**fields))
    tokens = torch.randint(
        config.vocab_size, (TRAINER_STEPS * ACCUMULATION * batch, length)
    )
    settings = TrainingArguments(
        mkdtemp(prefix="trainer-"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=TRAINER_STEPS,
        bf16=device == "cuda",
        optim="adamw_torch_fused",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=device == "cpu",
        torch_compile=device == "cuda",
    )
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(model, settings, train_dataset=data).train


CONTESTANTS: dict[str, Callable[..., Step]] = {
    "ours, compile block": ours,
    "ours, compile whole": partial(ours, switches=Switches(compile="whole")),
    "ours, compile off": partial(ours, switches=Switches(compile="off")),
    "plain torch, compiled": plain,
    "transformers in a loop, compiled": theirs,
    "transformers in a loop": partial(theirs, compiled=False),
    "transformers' Trainer": trainer,
}
# Against "ours, compile block" of the same size. 50,257 tokens, as GPT-2's, are padded to 50,304.
SWITCHED: dict[str, Callable[..., Step]] = {
    "ours, all logits at once": partial(ours, switches=Switches(loss_chunk=0)),
    "ours, 50,257 tokens": partial(ours, switches=Switches(vocabulary=(50257, 1))),
    "ours, 50,257 tokens, padded": partial(
        ours, switches=Switches(vocabulary=(50257, 128))
    ),
}


def timed(
    contestant: str, size: str, length: int, device: str, rehearse: bool
) -> list[Row]:
    """One contestant's steps, in a process of its own."""
    batch, length = tokens_of(size, length, rehearse)
    config = model_config(size, length, rehearse)
    torch.manual_seed(0)
    start = (CONTESTANTS | SWITCHED)[contestant]
    step = start(config, batch, length, device)
    steps = TRAINER_STEPS if start is trainer else 1
    seconds = (
        seconds_of(
            step, device, rounds=1 if rehearse else 8, warm_up=1 if rehearse else 3
        )
        / steps
    )
    tokens = ACCUMULATION * batch * length
    flops = flops_per_token(config, length) * tokens / seconds
    measured = peak_flops(torch.device(device), half(device))
    vendor = vendor_peak(device)
    row: Row = {
        "who": contestant,
        "tokens per step": tokens,
        "ms per step": 1000 * seconds,
    }
    row |= {"tokens/s": tokens / seconds, "MFU of measured": flops / measured}
    return [
        row
        | {
            "MFU of vendor": flops / vendor if vendor else None,
            "peak GB": peak_bytes(device) / 1e9,
        }
    ]


PEERS = (
    "ours, compile block",
    "plain torch, compiled",
    "transformers in a loop, compiled",
    "transformers' Trainer",
)
BY_LENGTH = {
    ("125M", 2048): CONTESTANTS,
    ("800M", 2048): (*PEERS, *SWITCHED),
    ("1.5B", 2048): PEERS,
    ("1.5B", 8192): PEERS[:-1],
}


def _cases() -> dict[str, Case]:
    cases = {"ceilings": Case(ceilings, 30)}
    for (size, length), names in BY_LENGTH.items():
        for name in names:  # to compile a whole model takes longer
            seconds = 60 if name in ("ours, compile whole", *PEERS[1:3]) else 40
            cases[f"{size} at {length}: {name}"] = Case(
                partial(timed, name, size, length), seconds
            )
    return cases


CASES = _cases()
