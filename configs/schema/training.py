"""How the model is trained.

What is reported, how long and over which batches, by which optimizer, saved when, spread how.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from infini_llama.configs.choices import OneOf, descriptions
from infini_llama.configs.durations import COUNT, DURATION, count, duration
from infini_llama.configs.optimizers import OPTIMIZERS
from infini_llama.configs.parallel import STRATEGIES, fault_of_compile, fits
from infini_llama.configs.schedules import SCHEDULES
from infini_llama.configs.schema.section import Section, fixed, free, inexact

Count = Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=COUNT)]
Interval = Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=DURATION)]


class TrainingConfig(Section):
    """How the model is trained. The number of gradient accumulation steps is global_batch_size /
    (micro_batch_size × workers) and must be an integer.
    """

    logging_steps: Annotated[int, Field(ge=1)] = free(
        default=10,
        description="Steps between lines on the console (loss, learning rate, tokens per second) "
        "and in TensorBoard. metrics.jsonl has every step.",
    )
    report_to: list[Literal["tensorboard", "wandb"]] = free(
        default=["tensorboard"],
        description="Loggers in addition to metrics.jsonl: tensorboard, wandb (the extra `wandb`; "
        "offline with WANDB_MODE=offline).",
    )
    metrics_hook: (
        Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None
    ) = free(
        default=None,
        description="A function (module:function) that every worker calls at logged steps with the "
        "model and the step's record. It returns a dict of numbers, which are logged under custom.",
    )
    profile_steps: list[Annotated[int, Field(ge=1)]] | None = free(
        default=None,
        description="First and last step for torch's profiler, for example [20, 24]. Traces and a "
        "table are written to `profile` in the run's folder.",
    )
    eval_tokens: Count | None = fixed(  # losses of a run are compared with each other
        default=None,
        description="Validation tokens per evaluation, for example 1M; the same each time, drawn "
        "from all. Default: 64 sequences.",
    )
    sample_prompts: list[Annotated[str, Field(min_length=1)]] | None = free(
        default=None,
        description="Prompts that the model continues at each evaluation and at the end. The texts "
        "are in samples.jsonl, result.json and the report. Empty: no samples. Default: the "
        "beginning of a held-out text.",
    )
    sample_tokens: Annotated[int, Field(ge=1)] = free(
        default=128, description="Tokens per sample."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = fixed(
        default=1234, description="Seed of the initial weights and of the sample order."
    )
    init_from: str | None = fixed(
        is_path=True,
        default=None,
        description="Hugging Face folder of a Llama, or a folder written by export, with the "
        "initial weights (safetensors). `infini-llama import` writes a matching configuration. "
        "Default: random weights.",
        min_length=1,
    )
    init_gate: float | list[float | list[float]] | None = fixed(
        default=None,
        description="Initial value of Infini-attention's gates, before the sigmoid; not used if "
        "train.init_from has gates. A list has an entry per layer with a memory: a value, or a "
        "list of one per head. Default: 0 for random weights, -2 with train.init_from, which mixes "
        "in 12 % of the memory.",
    )
    frozen_layers: Annotated[int, Field(ge=0)] | Literal["all_but_memory"] = fixed(
        default=0,
        description="Leave the first layers of train.init_from as they are, with the embedding and "
        "a head that is tied to it. They have no gradients and no optimizer state, and the "
        "backward pass ends above them. 0: train everything. all_but_memory: train the attention "
        "(projections, gates and maps) of the layers that have a memory, and nothing else.",
    )
    max_steps: Annotated[int, Field(ge=1)] | None = inexact(
        default=None,
        description="Optimizer steps of the run. Default: 1000, unless num_epochs or max_tokens is "
        "set.",
    )
    num_epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = inexact(
        default=None,
        description="Epochs over the training sequences, instead of max_steps. The order differs "
        "in every epoch.",
    )
    max_tokens: Count | None = inexact(
        default=None,
        description="Training tokens (targets), instead of max_steps, for example 300M.",
    )
    # Every worker computes the numbers of all of them.
    global_batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = fixed(
        default=32,
        description="Sequences per optimizer step, over all workers and accumulation steps.",
    )
    micro_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = inexact(
        default=None,
        description="Sequences per forward pass of one worker (per-device batch size). Default: "
        "the most, up to 8, that divide the worker's share of train.global_batch_size. auto: as "
        "many as fit into memory, by the estimate. After an attempt ran out of memory, the run "
        "uses at most half of that attempt's, also where a larger value is set.",
    )
    document_masking: bool = fixed(
        default=False,
        description="Isolate packed documents: attention stays inside each document, positions "
        "restart, and Infini-attention's memory is empty at its start.",
    )
    dataloader_num_workers: Annotated[int, Field(ge=0, le=64)] = free(
        default=0,
        description="Threads per worker that prepare the next batches, in pinned memory for a GPU. "
        "0: none. The batches do not depend on it.",
    )
    learning_rate: Annotated[float, Field(gt=0)] = inexact(
        default=1e-3, description="Peak learning rate, after the warm-up."
    )
    lr_schedule: Annotated[str, OneOf(tuple(SCHEDULES))] = inexact(
        default="cosine",
        description="Learning-rate schedule after the warm-up. "
        + descriptions(SCHEDULES),
    )
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = inexact(
        default=0.1, description="Final learning rate as a fraction of the peak."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = inexact(
        default=100,
        description="Steps of linear warm-up from zero. Must be fewer than max_steps.",
    )
    optimizer: Annotated[str, OneOf(tuple(OPTIMIZERS))] = inexact(
        default="adamw", description=descriptions(OPTIMIZERS)
    )
    weight_decay: Annotated[float, Field(ge=0)] = inexact(
        default=0.1,
        description="Weight decay of matrices. Norms, embeddings, and gates and maps of a memory "
        "have none.",
    )
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = inexact(
        default=0.9, description="Decay of the first moment."
    )
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = inexact(
        default=0.95, description="Decay of the second moment."
    )
    adam_epsilon: Annotated[float, Field(gt=0)] = inexact(
        default=1e-8, description="Added to the denominator."
    )
    gate_learning_rate: Annotated[float, Field(gt=0)] = inexact(
        default=0.01,
        description="Peak learning rate of Infini-attention's gates, with the same schedule and "
        "without weight decay.",
    )
    map_learning_rate: Annotated[float, Field(gt=0)] = inexact(
        default=1e-3,
        description="Peak learning rate of the memory's maps (model.memory_maps), with the same "
        "schedule and without weight decay, whatever train.optimizer does with other matrices.",
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = inexact(
        default=1.0, description="Gradient clipping: maximum norm of the gradient."
    )
    loss_chunk: Annotated[int, Field(ge=0)] | Literal["auto"] = inexact(
        default="auto",
        description="Number of tokens whose logits are computed at a time. 0: the whole "
        "micro-batch. auto: 0 for small micro-batches, otherwise 128 MiB of logits on a CPU and "
        "4096 tokens on a GPU.",
    )
    z_loss: Annotated[float, Field(ge=0, le=1)] = inexact(
        default=0.0,
        description="Weight of log²(Z) in the gradient, for example 1e-4, which keeps logits "
        "small. Reported losses exclude it.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = inexact(
        default="none",
        description="Activation (gradient) checkpointing: what each layer recomputes in the "
        "backward pass to save memory. none: nothing. selective: everything except matrix "
        "products. full: everything.",
    )
    eval_steps: Interval = free(
        default=100,
        description="Interval between evaluations, in steps, or as '10M tokens' or '15 minutes'. "
        "Tokens are targets, as those of train.max_tokens; minutes of training count over all "
        "attempts. A checkpoint is saved at every new lowest validation loss. A run with "
        "train.init_from is also evaluated before its first step.",
    )
    early_stopping_patience: Annotated[int, Field(ge=1)] | None = inexact(
        default=None,
        description="End the run after this many evaluations in a row without improvement. "
        "Default: never.",
    )
    save_steps: Interval = free(
        default=200,
        description="Interval between checkpoints, in steps, or as '10M tokens' or '15 minutes', "
        "counted as those of train.eval_steps. The best model is saved in addition.",
    )
    save_total_limit: Annotated[int, Field(ge=2)] = free(
        default=3,
        description="Number of newest checkpoints to keep, in addition to the best one. At least "
        "2, in case the newest is damaged.",
    )
    save_permanent_every: Annotated[int, Field(ge=1)] | None = free(
        default=None,
        description="Save checkpoints at multiples of this step too, and keep them while the key "
        "has this value, in addition to train.save_total_limit. null: none.",
    )
    async_save: bool = free(
        default=True,
        description="Copy checkpoints to memory and write them in the background. false: training "
        "waits, and no copy is needed.",
    )
    parallel: Annotated[str, OneOf(tuple(STRATEGIES))] = inexact(
        default="ddp", description=descriptions(STRATEGIES)
    )
    zero_stage: Literal[1, 2, 3] | None = inexact(
        default=None,
        description="What is sharded: optimizer state (1, deepspeed only), also gradients (2), "
        "also parameters (3). With fsdp and hsdp, 2 keeps a layer's parameters between forward and "
        "backward, with more memory and less communication. Default: 3 with fsdp and hsdp; with "
        "deepspeed the stage in train.deepspeed_config, otherwise 2.",
    )
    deepspeed_config: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = (
        inexact(
            is_path=True,
            default=None,
            description="A DeepSpeed JSON file, or its contents. Its zero_optimization and "
            "communication settings are used. Batch sizes, optimizer, precision and clipping must "
            'be left out, be "auto", or agree with the keys of the run.',
        )
    )
    shard_size: Annotated[int, Field(ge=1)] | Literal["auto"] = inexact(
        default="auto",
        description="Number of workers that shard one copy of the model with train.parallel=hsdp. "
        "auto: the workers of one machine.",
    )
    context_parallel: Annotated[int, Field(ge=1)] = inexact(
        default=1,
        description="Number of workers that split each sequence (context parallelism), for "
        "sequences whose activations do not fit on one worker. Not with model.attention=softmax.",
    )
    compile: Literal["auto", "off", "block", "whole"] = inexact(
        default="auto",
        description="torch.compile of each layer (block), or of model and loss (whole; not with "
        "fsdp or hsdp). It is used only if it agrees with eager execution on the first batch. "
        "auto: block on GPUs that have a C compiler and triton, and for long runs in bf16 on a CPU "
        "with AMX and a C++ compiler; else off.",
    )
    max_skips: Annotated[int, Field(ge=0)] = inexact(
        default=10,
        description="Maximum number of skipped (non-finite) updates within 100 steps. One more "
        "rolls the run back to the last good checkpoint.",
    )
    spike_zscore: Annotated[float, Field(ge=3)] | None = inexact(
        default=None,
        description="Skip updates whose loss is this many robust standard deviations above the "
        "median of the last 128 losses, for example 8. null: never.",
    )

    def planned_steps(self, sequence_length: int) -> int:
        """The approximate number of steps of a run, before its dataset is at hand.

        An epoch is taken for 1000 steps, and every position for a target. With train.max_tokens,
        these are the steps of the run where `DataConfig.has_only_targets`; else the run has more.
        """
        if self.max_steps is not None:
            return self.max_steps
        if self.max_tokens is not None:
            return -(
                -count(self.max_tokens) // (self.global_batch_size * sequence_length)
            )
        return max(1, round(1000 * (self.num_epochs or 1.0)))

    def planned_tokens(self, sequence_length: int) -> int:
        """Tokens that the model reads in these steps."""
        return (
            self.global_batch_size
            * sequence_length
            * self.planned_steps(sequence_length)
        )

    @property
    def least_micro_batch(self) -> int:
        """Sequences per forward pass; 1 where that is chosen by rule."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else 1

    def groups(self, workers: int) -> int:
        """Number of groups of workers that have rows of their own; at least 1.

        A global batch is split among them.
        """
        return max(1, workers // self.context_parallel)

    def shards(self, workers: int, workers_per_node: int) -> int:
        """Workers that share one copy of the model; 1 where each has its own."""
        shard_size = workers_per_node if self.shard_size == "auto" else self.shard_size
        return STRATEGIES[self.parallel].shards(workers, shard_size)

    @field_validator("eval_tokens")
    @classmethod
    def _in_numbers(cls, value: Count | None) -> Count | None:
        # 1M and 1000000 are the same run.
        return None if value is None else count(value)

    @model_validator(mode="after")
    def _a_span_of_steps(self) -> TrainingConfig:
        span = self.profile_steps
        if span is not None and (len(span) != 2 or span[0] > span[1]):
            raise ValueError(
                f"profile_steps={span} is not a first and a last step, for example [20, 24]"
            )
        return self

    @model_validator(mode="after")
    def _one_length(self) -> TrainingConfig:
        lengths = {
            name: getattr(self, name)
            for name in ("max_steps", "num_epochs", "max_tokens")
        }
        lengths = {name: value for name, value in lengths.items() if value is not None}
        if len(lengths) > 1:
            settings = " and ".join(
                f"{name}={value}" for name, value in lengths.items()
            )
            raise ValueError(
                f"{settings} both set the length of the run; set all but one to null"
            )
        if not lengths:
            self.max_steps = 1000
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be fewer than max_steps={self.max_steps}"
            )
        return self

    @model_validator(mode="after")
    def _choices_fit_each_other(self) -> TrainingConfig:
        if (
            self.early_stopping_patience is not None
            and duration(self.eval_steps).unit == "seconds"
        ):
            raise ValueError(
                f"early_stopping_patience={self.early_stopping_patience} cannot be combined with "
                f"eval_steps={self.eval_steps}: when a run "
                "ends would depend on the clock; give steps or tokens"
            )
        strategies = [name for name in STRATEGIES if fits(self.optimizer, name)]
        if self.parallel not in strategies:
            others = [name for name in OPTIMIZERS if fits(name, self.parallel)]
            raise ValueError(
                f"optimizer={self.optimizer} cannot be combined with parallel={self.parallel}; use "
                f"parallel={' or '.join(strategies)}, or optimizer={' or '.join(others)}"
            )
        if self.frozen_layers and self.init_from is None:
            raise ValueError(
                f"frozen_layers={self.frozen_layers} leaves weights as they are, and without "
                "init_from they are random; set init_from, or frozen_layers=0"
            )
        if self.frozen_layers and self.parallel == "deepspeed":
            raise ValueError(
                f"frozen_layers={self.frozen_layers} cannot be combined with parallel=deepspeed; "
                "use parallel=fsdp"
            )
        if self.parallel == "deepspeed" and self.context_parallel > 1:
            raise ValueError(
                f"context_parallel={self.context_parallel} cannot be combined with "
                "parallel=deepspeed; use parallel=fsdp"
            )
        if self.parallel != "deepspeed" and self.deepspeed_config is not None:
            raise ValueError(
                f"train.deepspeed_config is given, but parallel={self.parallel}; use "
                "parallel=deepspeed"
            )
        stages = STRATEGIES[self.parallel].zero_stages
        if self.zero_stage is not None and not stages:
            raise ValueError(
                f"zero_stage={self.zero_stage} is given, but parallel={self.parallel} shards "
                "nothing; use parallel=fsdp"
            )
        if self.zero_stage is not None and self.zero_stage not in stages:
            raise ValueError(
                f"parallel={self.parallel} has no zero_stage={self.zero_stage}; use {stages[0]}, "
                "or parallel=deepspeed"
            )
        fault = fault_of_compile(self.compile, self.parallel)
        if fault:
            raise ValueError(fault)
        return self
