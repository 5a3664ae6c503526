"""Memory: the estimate against the allocator's peak, the largest micro-batch, and what saving a checkpoint holds up."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from case import SHAPES, TOKENS, VOCABULARY, Case, Row, one_rank, peak_bytes, precision
from part_correctness import finish

from infini_llama.configs.schema import PipelineConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.patch_environment.footprint import (
    bytes_needed,
    chunk_of,
    model_of,
)
from infini_llama.tasks.train.worker.data.loader import Batch, GlobalBatch
from infini_llama.tasks.train.worker.initial_model import save_memory
from infini_llama.tasks.train.worker.strategies.strategy import build_strategy
from infini_llama.tasks.train.worker.trainer import optimizer_step

NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def configuration(
    size: str, length: int, rehearse: bool, **settings: dict[str, Any]
) -> PipelineConfig:
    """The sections of a run of this size; `settings` are fields by section."""
    shape = dict(
        zip(NAMES, (64, 128, 2, 4, 2) if rehearse else SHAPES[size], strict=True)
    )
    data = {
        "source": "python-stdlib",
        "sequence_length": length,
        "tokenizer": {"vocab_size": 512 if rehearse else VOCABULARY},
    }
    sections: dict[str, Any] = {
        "data": data,
        "model": shape | settings.get("model", {}),
    }
    return PipelineConfig.model_validate(
        sections | {"train": settings.get("train", {})}
    )


def two_steps(config: PipelineConfig, micro: int, device: str) -> int:
    """Peak bytes of two steps of one micro-batch, as a worker makes them."""
    ranks, length = one_rank(device), config.data.sequence_length
    with ranks.device:
        model = Llama(model_of(config))
    save_memory(
        model,
        config.train,
        chunk_of(config, "cuda" if device == "cuda" else "cpu", micro * length),
    )
    strategy = build_strategy(model, config.train, precision(device), micro, ranks)
    for _ in range(2):  # the optimizer's state exists from the second on
        rows = torch.randint(
            model.config.vocab_size, (micro, length + 1), device=ranks.device
        )
        batch = GlobalBatch([Batch(rows[:, :-1], rows[:, 1:])], micro * length)
        optimizer_step(strategy, batch, 1.0, lambda loss: False, lambda: False, ranks)
    return peak_bytes(device)


def estimates(device: str, rehearse: bool) -> list[Row]:
    """`infini-llama estimate` against the peak of torch's allocator."""
    rows: list[Row] = []
    infini: dict[str, dict[str, Any]] = {
        "model": {"attention": "infini", "segment_length": 16 if rehearse else 1024}
    }
    full: dict[str, dict[str, Any]] = {"train": {"activation_checkpointing": "full"}}
    cases: list[tuple[str, dict[str, dict[str, Any]]]] = [
        ("125M", {}),
        ("125M", infini),
        ("800M", {}),
        ("1.5B", full),
    ]
    length = 64 if rehearse else 2048
    for size, settings in cases[: 2 if rehearse else None]:
        config, micro = (
            configuration(size, length, rehearse, **settings),
            2 if rehearse else TOKENS[size] // length,
        )
        need = bytes_needed(
            config, micro, precision(device), "cuda" if device == "cuda" else "cpu", 1
        )
        reset(device)
        peak, estimated = two_steps(config, micro, device), sum(need.values())
        row: Row = {
            "size": size,
            "settings": json.dumps(settings),
            "estimated GB": estimated / 1e9,
            "peak GB": peak / 1e9,
        }
        rows.append(row | {"estimated / peak": estimated / peak})
    return rows


def reset(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def largest(device: str, rehearse: bool) -> list[Row]:
    """The largest micro-batch that fits, by doubling and then halving the distance, against the one that `auto` would choose."""
    from infini_llama.tasks.patch_environment.footprint import fits

    config = configuration("800M", 64 if rehearse else 2048, rehearse)
    kind = "cuda" if device == "cuda" else "cpu"
    have = torch.cuda.mem_get_info()[0] if device == "cuda" else 2**30
    largest = 4 if rehearse else 64
    low, high = 1, largest + 1
    while high - low > 1:
        middle = (low + high) // 2
        reset(device)
        try:
            two_steps(config, middle, device)
            low = middle
        except torch.OutOfMemoryError:
            high = middle
    chosen = max(
        (
            size
            for size in range(1, largest + 1)
            if fits(bytes_needed(config, size, precision(device), kind, 1), have)
        ),
        default=1,
    )
    return [
        {
            "largest that fits": low,
            "auto": chosen,
            "auto / largest": chosen / low,
            "tried up to": largest,
        }
    ]


def checkpoint(device: str, rehearse: bool) -> list[Row]:
    """A real run of 1.5B that saves: the stall of the step, the time of writing, and its peak against the estimate."""
    settings: dict[str, Any] = {
        "environment.device": device,
        "train.max_steps": 6,
        "train.warmup_steps": 1,
    }
    settings |= {
        "train.global_batch_size": 2,
        "train.micro_batch_size": 1,
        "train.save_steps": 3,
        "train.eval_steps": 6,
    }
    if not rehearse:
        shape = dict(zip(NAMES, SHAPES["1.5B"], strict=True))
        settings |= {f"model.{name}": value for name, value in shape.items()}
        settings |= {
            "data.sequence_length": 2048,
            "train.save_total_limit": 2,
            "train.activation_checkpointing": "full",
        }
    with TemporaryDirectory(prefix="checkpoint-") as folder:
        finish(Path(folder), "saves", settings)
        lines = (
            (Path(folder) / "runs" / "saves" / "metrics.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        )
    steps = [record for record in map(json.loads, lines) if "step_time" in record]
    stall = max(record["save_time"] or 0.0 for record in steps)
    written = max(record["save_write_time"] or 0.0 for record in steps)
    return [
        {
            "stall s": stall,
            "writing s": written,
            "peak GB": max(record["memory_peak"] for record in steps) / 1e9,
        }
    ]


CASES = {
    "estimates": Case(estimates, 80),
    "largest micro-batch": Case(largest, 90),
    "checkpoint": Case(checkpoint, 140),
}
