"""The size of a model that fits a text and this machine, and how it is trained."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.model.config import parameters
from infini_llama.tasks.estimate.run import worker_memory
from infini_llama.tasks.formatting import in_millions
from infini_llama.tasks.patch_environment.footprint import (
    bytes_of_plan,
    fits,
    memory_per_worker,
    model_of,
)
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.records.machine import Gpu, MachineFacts

NEAR = 3  # times as many parameters, or as few
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv 2203.15556
MOST_EPOCHS = 4  # Muennighoff et al. 2023, arXiv 2305.16264
SHORTEST = 128  # tokens per sequence
FEWEST_STEPS = 200
HOURS = 24.0
# Assumed FLOP/s of training, for the limit of hours alone: per GPU by its compute capability, per
# core of a CPU.
GPU_SPEED = {
    (12, 0): 60e12,  # no data center's, as (8, 6) and (8, 9)
    (9, 0): 300e12,
    (8, 9): 60e12,
    (8, 6): 30e12,
    (8, 0): 120e12,
    (0, 0): 20e12,
}
CORE_SPEED = 30e9
# Ways to need less memory, from the fastest to the smallest.
SAVING: tuple[dict[str, str], ...] = (
    {},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "parallel": "fsdp"},
)


@dataclass(frozen=True)
class Size:
    """A model that is known to train well, and how.

    Attributes:
        length: tokens per sequence.
        batch: tokens per step.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_value_heads: int
    vocab_size: int
    length: int
    batch: int
    learning_rate: float


SIZES = (
    Size(128, 384, 4, 4, 2, 4096, 256, 2**13, 1.5e-3),
    Size(256, 768, 6, 8, 4, 8192, 512, 2**13, 1.0e-3),
    Size(512, 1536, 8, 8, 4, 8192, 1024, 2**16, 6.0e-4),
    Size(768, 2048, 12, 12, 12, 32768, 1024, 2**18, 6.0e-4),
    Size(1024, 3072, 24, 16, 8, 50304, 1024, 2**18, 3.0e-4),
    Size(1536, 5120, 24, 16, 8, 50304, 2048, 2**19, 2.5e-4),
    Size(2560, 8192, 32, 20, 10, 50304, 2048, 2**20, 2.0e-4),
    Size(4096, 11008, 32, 32, 8, 50304, 4096, 2**21, 1.5e-4),
)


@dataclass(frozen=True)
class Overrides:
    """Settings of the command line in place of a rule or a default.

    Attributes:
        hours: at an assumed speed of this machine.
        text_column: field or column with the text.
    """

    tokens: int | None = None
    parameters: int | None = None
    hours: float | None = None
    text_column: str | None = None


@dataclass(frozen=True)
class Fitted:
    """A configuration, and how it is trained on this machine.

    Attributes:
        mapping: its sections data, model and train, without what follows.
        batch: sequences per step.
        saving: settings that need less memory.
    """

    mapping: dict[str, Any]
    parameters: int
    tokens: int
    length: int
    batch: int
    steps: int
    workers: int
    memory: int
    saving: dict[str, str]


def plan_size(
    size: Size,
    text: int,
    facts: MachineFacts,
    home: Path,
    overrides: Overrides,
    attention: str,
) -> Fitted | None:
    """A new model of this size with its length, batch and steps.

    Returns:
        None: it does not fit into the machine's memory.
    """
    length = min(size.length, max(SHORTEST, 2 ** int(math.log2(text / 64))))
    mapping: dict[str, Any] = {
        "data": {
            "files": ["x"],
            "sequence_length": length,
            "tokenizer": {"vocab_size": size.vocab_size},
        },
        "model": {
            "hidden_size": size.hidden_size,
            "intermediate_size": size.intermediate_size,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.key_value_heads,
            "attention": attention,
            "segment_length": length // 4,
        },
        "train": {"learning_rate": size.learning_rate},
    }
    total = parameters(model_of(PipelineConfig.model_validate(mapping)))
    tokens = overrides.tokens
    if not tokens:
        enough = min(max(TOKENS_PER_PARAMETER * total, text), MOST_EPOCHS * text)
        tokens = min(enough, int(affordable_flops(facts, overrides) / (6 * total)))
    return fit_to_memory(mapping, size.vocab_size, size.batch, tokens, facts, home)


def fit_to_memory(
    mapping: dict[str, Any],
    vocabulary: int,
    most_per_step: int,
    tokens: int,
    facts: MachineFacts,
    home: Path,
) -> Fitted | None:
    """Batch, steps and what saves memory for a configuration.

    Args:
        most_per_step: tokens of a step at most; with few tokens in all, a step has fewer, so that
            there are enough steps.
        tokens: of the whole training.

    Returns:
        None: it does not fit into the machine's memory.
    """
    length = mapping["data"]["sequence_length"]
    gpus = max(1, len(facts.gpus))
    per_step = min(most_per_step, max(gpus * length, tokens // FEWEST_STEPS))
    batch = gpus * 2 ** max(0, round(math.log2(per_step / length / gpus)))
    for saving in SAVING if gpus > 1 else SAVING[:-1]:
        train = mapping["train"] | {
            "global_batch_size": batch,
            "micro_batch_size": "auto",
            **saving,
        }
        config = PipelineConfig.model_validate(
            mapping | {"train": train, "runtime": {"home": home}}
        )
        config = config.with_vocab_size(vocabulary)
        plan = plan_environment(config, facts)
        need = bytes_of_plan(config, plan)
        have = memory_per_worker(facts, plan.gpus, plan.nproc_per_node)
        if fits(need, have):
            steps = max(20, tokens // (batch * length))
            return Fitted(
                mapping=mapping,
                parameters=parameters(model_of(config)),
                tokens=steps * batch * length,
                length=length,
                batch=batch,
                steps=steps,
                workers=plan.nproc_per_node,
                memory=sum(worker_memory(config, plan).values()),
                saving=saving,
            )
    return None


def choose_size(
    fitting: list[Fitted], text: int, facts: MachineFacts, overrides: Overrides
) -> tuple[Fitted, str]:
    """The size to train, and the reason.

    Raises:
        ConfigError: no size is near the number of parameters that is asked for.
    """
    if parameters := overrides.parameters:
        nearest = min(
            fitting, key=lambda plan: abs(math.log(plan.parameters / parameters))
        )
        if not 1 / NEAR < nearest.parameters / parameters < NEAR:
            smallest, largest = (
                in_millions(size.parameters) for size in (fitting[0], fitting[-1])
            )
            raise ConfigError(
                f"--parameters: sizes from {smallest} to {largest} parameters are known that fit "
                f"into this machine's memory, but none is near {in_millions(parameters)}; name "
                "one of these, or write the section model by hand."
            )
        return nearest, f"the nearest to {in_millions(parameters)}"
    tokens = overrides.tokens or MOST_EPOCHS * text
    enough = [
        plan for plan in fitting if TOKENS_PER_PARAMETER * plan.parameters <= tokens
    ]
    enough = enough or fitting[:1]
    timely = enough
    if overrides.tokens is None or overrides.hours:
        flops = affordable_flops(facts, overrides)
        timely = [
            plan
            for plan in enough
            if 6 * TOKENS_PER_PARAMETER * plan.parameters**2 <= flops
        ]
    chosen = (timely or enough[:1])[-1]
    if chosen is fitting[-1] and len(fitting) < len(SIZES):
        return chosen, "the largest that fits into the memory"
    if TOKENS_PER_PARAMETER * chosen.parameters > tokens:
        return chosen, "the smallest, since there is little text"
    if len(timely) < len(enough):
        return chosen, (
            f"what trains in {overrides.hours or HOURS:g} hours at an assumed speed; "
            "--hours changes it"
        )
    epochs = "" if overrides.tokens else f", from at most {MOST_EPOCHS} epochs"
    return chosen, f"{TOKENS_PER_PARAMETER} tokens per parameter{epochs}"


def affordable_flops(facts: MachineFacts, overrides: Overrides) -> float:
    """FLOPs of the hours, at an assumed speed."""
    speed = (
        sum(map(_speed, facts.gpus)) if facts.gpus else CORE_SPEED * max(1, facts.cores)
    )
    return 3600 * (overrides.hours or HOURS) * speed


def _speed(gpu: Gpu) -> float:
    return next(
        speed for capability, speed in GPU_SPEED.items() if gpu.capability >= capability
    )
