"""How the model is trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from infini_llama.configs.durations import DURATION, duration
from infini_llama.configs.schema.optimization import OptimizationConfig
from infini_llama.configs.schema.section import exact, free

Interval = Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=DURATION)]


class TrainingConfig(OptimizationConfig):
    """How the model is trained. The number of gradient accumulation steps is global_batch_size / (micro_batch_size × workers)
    and must be an integer.
    """

    loss_chunk: Annotated[int, Field(ge=0)] | Literal["auto"] = exact(
        default="auto",
        title="Loss chunk",
        description="Number of tokens whose logits are computed at a time. 0: the whole micro-batch. auto: 0 for "
        "small micro-batches, otherwise 128 MiB of logits on a CPU and 4096 tokens on a GPU.",
    )
    z_loss: Annotated[float, Field(ge=0, le=1)] = exact(
        default=0.0,
        title="z-loss",
        description="Weight of log²(Z) in the gradient, for example 1e-4, which keeps logits small. Reported losses exclude it.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = exact(
        default="none",
        title="Activation checkpointing",
        description="Activation (gradient) checkpointing: what each layer recomputes in the backward pass to save "
        "memory. none: nothing. selective: everything except matrix products. full: everything.",
    )
    eval_steps: Interval = free(
        default=100,
        title="Evaluate every",
        description="Interval between evaluations, in steps, or as '10M tokens' or '15 minutes'. A checkpoint is "
        "saved at every new lowest validation loss.",
    )
    early_stopping_patience: Annotated[int, Field(ge=1)] | None = exact(
        default=None,
        title="Early stopping patience",
        description="End the run after this many evaluations in a row without improvement. Default: never.",
    )
    save_steps: Interval = free(
        default=200,
        title="Save every",
        description="Interval between checkpoints, in steps, or as '10M tokens' or '15 minutes'. The best model is "
        "saved in addition.",
    )
    save_total_limit: Annotated[int, Field(ge=2)] = free(
        default=3,
        title="Checkpoints kept",
        description="Number of newest checkpoints to keep, in addition to the best one. At least 2, in case the "
        "newest is damaged.",
    )
    save_permanent_every: Annotated[int, Field(ge=1)] | None = free(
        default=None,
        title="Permanent every",
        description="Keep checkpoints at multiples of this step forever, in addition to train.save_total_limit. null: none.",
    )
    async_save: bool = free(
        default=True,
        title="Asynchronous save",
        description="Copy checkpoints to memory and write them in the background. false: training waits, and no copy is needed.",
    )
    parallel: Literal["ddp", "fsdp", "hsdp", "deepspeed"] = exact(
        default="ddp",
        title="Parallel strategy",
        description="ddp: the model is replicated on every worker. fsdp: parameters, gradients and optimizer state "
        "are sharded over all workers (FSDP2). hsdp: sharded in groups of train.shard_size workers and "
        "replicated between groups. deepspeed: sharded by DeepSpeed's ZeRO (extra `deepspeed`).",
    )
    zero_stage: Literal[1, 2, 3] | None = exact(
        default=None,
        title="ZeRO stage",
        description="What is sharded: optimizer state (1, deepspeed only), also gradients (2), also parameters (3). With fsdp and "
        "hsdp, 2 keeps a layer's parameters between forward and backward, with more memory and less communication. Default: 3 "
        "with fsdp and hsdp; with deepspeed the stage in train.deepspeed_config, otherwise 2.",
    )
    deepspeed_config: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = exact(
        default=None,
        title="DeepSpeed configuration",
        description="A DeepSpeed JSON file, or its contents. Its zero_optimization and communication settings are "
        'used. Batch sizes, optimizer, precision and clipping must be left out, be "auto", or agree with '
        "the keys of the run.",
    )
    shard_size: Annotated[int, Field(ge=1)] | Literal["auto"] = exact(
        default="auto",
        title="Shard size",
        description="Number of workers that shard one copy of the model with train.parallel=hsdp. auto: the workers "
        "of one machine.",
    )
    context_parallel: Annotated[int, Field(ge=1)] = exact(
        default=1,
        title="Context parallel",
        description="Number of workers that split each sequence (context parallelism), for sequences whose "
        "activations do not fit on one worker. Not with model.attention=softmax.",
    )
    compile: Literal["auto", "off", "block", "whole"] = exact(
        default="auto",
        title="Compile",
        description="torch.compile of each layer (block), or of model and loss (whole; not with fsdp or hsdp). It is "
        "used only if it agrees with eager execution on the first batch. auto: block on GPUs that have a C compiler "
        "and triton, off on CPUs.",
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = exact(
        default="default",
        title="Compile mode",
        description="The mode of torch.compile, passed to it as it is.",
    )
    max_skips: Annotated[int, Field(ge=0)] = exact(
        default=10,
        title="Maximum skips",
        description="Maximum number of skipped (non-finite) updates within 100 steps. One more rolls the run "
        "back to the last good checkpoint.",
    )
    spike_zscore: Annotated[float, Field(ge=3)] | None = exact(
        default=None,
        title="Loss spike threshold",
        description="Skip updates whose loss is this many robust standard deviations above the median of the last 128 losses, for"
        " example 8. null: never.",
    )

    def groups(self, workers: int) -> int:
        """Groups of workers that have rows of their own, among which a global batch is split; at least 1."""
        return max(1, workers // self.context_parallel)

    def shards(self, workers: int, workers_per_node: int) -> int:
        """Workers that share one copy of the model; 1 where each has its own."""
        if self.parallel in ("ddp", "deepspeed"):  # of ZeRO, what every stage fits into
            return 1
        if self.parallel == "fsdp":
            return workers
        return workers_per_node if self.shard_size == "auto" else self.shard_size

    @model_validator(mode="after")
    def _exact_by_steps_alone(self) -> TrainingConfig:
        if self.early_stopping_patience is not None and duration(self.eval_steps).unit == "seconds":
            raise ValueError(
                f"early_stopping_patience={self.early_stopping_patience} cannot be combined with "
                f"eval_steps={self.eval_steps}: when a run "
                "ends would depend on the clock; give steps or tokens"
            )
        if self.optimizer == "muon" and self.parallel != "ddp":
            raise ValueError(
                f"optimizer=muon needs whole matrices, which parallel={self.parallel} shards; use parallel=ddp"
            )
        if self.parallel == "deepspeed" and self.optimizer == "sgd":
            raise ValueError("optimizer=sgd cannot be combined with parallel=deepspeed; use optimizer=adamw or adam")
        if self.parallel == "deepspeed" and self.context_parallel > 1:
            raise ValueError(
                f"context_parallel={self.context_parallel} cannot be combined with parallel=deepspeed; use "
                "parallel=fsdp"
            )
        if self.parallel != "deepspeed" and self.deepspeed_config is not None:
            raise ValueError(f"deepspeed_config is given, but parallel={self.parallel}; use parallel=deepspeed")
        if self.parallel == "ddp" and self.zero_stage is not None:
            raise ValueError(
                f"zero_stage={self.zero_stage} is given, but parallel=ddp shards nothing; use parallel=fsdp"
            )
        if self.parallel in ("fsdp", "hsdp") and self.zero_stage == 1:
            raise ValueError(f"parallel={self.parallel} has no zero_stage=1; use 2, or parallel=deepspeed")
        return self

    @model_validator(mode="after")
    def _compile_fits_parallel(self) -> TrainingConfig:
        if self.compile in ("block", "whole") and self.parallel == "deepspeed":
            raise ValueError(
                f"compile={self.compile} cannot be combined with parallel=deepspeed; use compile=off, or parallel=fsdp"
            )
        if self.compile == "whole" and self.parallel != "ddp":
            raise ValueError(
                f"compile=whole cannot be combined with parallel={self.parallel}, which gathers parameters layer by "
                "layer; use compile=block"
            )
        return self
