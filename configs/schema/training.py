"""How the model is trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from infini_llama.configs.durations import DURATION, duration
from infini_llama.configs.schema.reporting import Count, ReportingConfig
from infini_llama.configs.schema.section import Resume, on_resume

Interval = Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=DURATION)]


class TrainingConfig(ReportingConfig):
    """How the model is trained. The number of gradient accumulation steps is global_batch_size / (micro_batch_size × workers)
    and must be an integer.
    """

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=1234,
        title="Seed",
        description="Seed of the initial weights and of the sample order.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    init_from: str | None = Field(
        default=None,
        title="Initial weights",
        description="Hugging Face folder of a Llama, or a folder written by export, with the initial weights "
        "(safetensors). `infini-llama import` writes a matching configuration. Default: random weights.",
        min_length=1,
        json_schema_extra=on_resume(Resume.FIXED),
    )
    init_gate: float = Field(
        default=-2.0,
        title="Initial gates",
        description="Initial value of Infini-attention's gates, before the sigmoid, if train.init_from has none. -2 mixes in 12 %"
        " of the memory.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    max_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Steps",
        description="Optimizer steps of the run. Default: 1000, unless num_epochs or max_tokens is set.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    num_epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        title="Epochs",
        description="Epochs over the training sequences, instead of max_steps. The order differs in every epoch.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    max_tokens: Count | None = Field(
        default=None,
        title="Tokens",
        description="Training tokens (targets), instead of max_steps, for example 300M.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    repeat_data: bool = Field(
        default=True,
        title="Repeat data",
        description="Allow more than one epoch. false: a run that needs more than one is refused before its first "
        "step.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    global_batch_size: Annotated[int, Field(ge=1)] = Field(
        default=32,
        title="Global batch size",
        description="Sequences per optimizer step, over all workers and accumulation steps.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    micro_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=8,
        title="Micro-batch size",
        description="Sequences per forward pass of one worker (per-device batch size). auto: as many as fit into "
        "memory, by the estimate.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    document_isolation: bool = Field(
        default=False,
        title="Document isolation",
        description="Isolate packed documents: attention stays inside each document, positions restart, and "
        "Infini-attention's memory is empty at its start.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    prefer_long_documents: Annotated[float, Field(ge=0, le=4)] = Field(
        default=0.0,
        title="Prefer long documents",
        description="Oversample long documents: a document of twice the length is used 2 to this power times as "
        "often. 0: every sequence once per epoch. Needs about 36 bytes of memory per sequence and 30 per "
        "document at the start.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    dataloader_num_workers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0,
        title="Data loader workers",
        description="Threads per worker that prepare the next batches, in pinned memory for a GPU. 0: none. The "
        "batches do not depend on it.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=1e-3,
        title="Learning rate",
        description="Peak learning rate, after the warm-up.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    lr_schedule: Literal["cosine", "linear", "constant", "polynomial", "inverse_sqrt", "wsd"] = Field(
        default="cosine",
        title="Schedule",
        description="Learning-rate schedule after the warm-up. wsd (warmup-stable-decay) stays at the peak until the "
        "last part of the run.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    lr_power: Annotated[float, Field(gt=0)] = Field(
        default=2.0,
        title="Polynomial power",
        description="Exponent of the polynomial schedule.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    lr_decay_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2,
        title="Decay ratio",
        description="Fraction of all steps in which the wsd schedule decays.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1,
        title="Final learning rate ratio",
        description="Final learning rate as a fraction of the peak.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=100,
        title="Warm-up steps",
        description="Steps of linear warm-up from zero. Must be fewer than max_steps.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    optimizer: Literal["adamw", "adam", "sgd", "muon"] = Field(
        default="adamw",
        title="Optimizer",
        description="Optimizer. muon is used for the matrices of the layers, with adamw for all other parameters. In "
        "adam and sgd, weight decay is added to the gradient.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.95,
        title="Momentum",
        description="Momentum of sgd and muon.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    weight_decay_embeddings: bool = Field(
        default=False,
        title="Decay embeddings",
        description="Apply weight decay to embeddings too.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1,
        title="Weight decay",
        description="Weight decay of matrices. Norms and gates have none. For embeddings, see weight_decay_embeddings.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9,
        title="Adam beta 1",
        description="Decay of the first moment.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.95,
        title="Adam beta 2",
        description="Decay of the second moment.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(
        default=1e-8,
        title="Adam epsilon",
        description="Added to the denominator.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    gate_learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=0.01,
        title="Gate learning rate",
        description="Peak learning rate of Infini-attention's gates, with the same schedule and without weight decay.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0,
        title="Gradient clipping",
        description="Gradient clipping: maximum norm of the gradient.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    loss_chunk: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        title="Loss chunk",
        description="Number of tokens whose logits are computed at a time. 0: the whole micro-batch. auto: 0 for "
        "small micro-batches, otherwise 256 on a CPU and 4096 on a GPU.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    z_loss: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        title="z-loss",
        description="Weight of log²(Z) in the gradient, for example 1e-4, which keeps logits small. Reported losses exclude it.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        title="Activation checkpointing",
        description="Activation (gradient) checkpointing: what each layer recomputes in the backward pass to save "
        "memory. none: nothing. selective: everything except matrix products. full: everything.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    eval_every: Interval = Field(
        default=100,
        title="Evaluate every",
        description="Interval between evaluations, in steps, or as '10M tokens' or '15 minutes'. A checkpoint is "
        "saved at every new lowest validation loss.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    early_stopping_patience: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Early stopping patience",
        description="End the run after this many evaluations in a row without improvement. Default: never.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    early_stopping_min_delta: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        title="Minimum improvement",
        description="Minimum decrease of the validation loss, in nats per token, that counts as an improvement.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    save_every: Interval = Field(
        default=200,
        title="Save every",
        description="Interval between checkpoints, in steps, or as '10M tokens' or '15 minutes'. The best model is "
        "saved in addition.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    save_total_limit: Annotated[int, Field(ge=2)] = Field(
        default=3,
        title="Checkpoints kept",
        description="Number of newest checkpoints to keep, in addition to the best one. At least 2, in case the "
        "newest is damaged.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    save_permanent_every: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Permanent every",
        description="Keep checkpoints at multiples of this step forever, in addition to train.save_total_limit. null: none.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    async_save: bool = Field(
        default=True,
        title="Asynchronous save",
        description="Copy checkpoints to memory and write them in the background. false: training waits, and no copy is needed.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    parallel: Literal["ddp", "fsdp", "hsdp", "deepspeed"] = Field(
        default="ddp",
        title="Parallel strategy",
        description="ddp: the model is replicated on every worker. fsdp: parameters, gradients and optimizer state "
        "are sharded over all workers (FSDP2). hsdp: sharded in groups of train.shard_size workers and "
        "replicated between groups. deepspeed: sharded by DeepSpeed's ZeRO (extra `deepspeed`).",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    zero_stage: Literal[1, 2, 3] | None = Field(
        default=None,
        title="ZeRO stage",
        description="ZeRO stage of train.parallel=deepspeed: shards optimizer state (1), also gradients (2), also "
        "parameters (3). Default: the stage in train.deepspeed_config, otherwise 2.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    deepspeed_config: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = Field(
        default=None,
        title="DeepSpeed configuration",
        description="A DeepSpeed JSON file, or its contents. Its zero_optimization and communication settings are "
        'used. Batch sizes, optimizer, precision and clipping must be left out, be "auto", or agree with '
        "the keys of the run.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    shard_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        title="Shard size",
        description="Number of workers that shard one copy of the model with train.parallel=hsdp. auto: the workers "
        "of one machine.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    reshard_after_forward: bool = Field(
        default=True,
        title="Reshard after forward",
        description="With fsdp and hsdp, free the parameters of a layer between forward and backward (ZeRO-3). false: keep them "
        "(ZeRO-2), with more memory and less communication.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    context_parallel: Annotated[int, Field(ge=1)] = Field(
        default=1,
        title="Context parallel",
        description="Number of workers that split each sequence (context parallelism), for sequences whose "
        "activations do not fit on one worker. Not with model.attention=softmax.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    compile: Literal["auto", "off", "block", "whole"] = Field(
        default="auto",
        title="Compile",
        description="torch.compile of each layer (block), or of model and loss (whole; not with fsdp or hsdp). It is "
        "used only if it agrees with eager execution on the first batch. auto: off; with "
        "environment.tune=full, on if it saves time.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    max_skips: Annotated[int, Field(ge=0)] = Field(
        default=10,
        title="Maximum skips",
        description="Maximum number of skipped (non-finite) updates within train.skip_window. One more rolls the run "
        "back to the last good checkpoint.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    skip_window: Annotated[int, Field(ge=1)] = Field(
        default=100,
        title="Skip window",
        description="Steps over which skipped updates are counted.",
        json_schema_extra=on_resume(Resume.EXACT),
    )
    spike_zscore: Annotated[float, Field(ge=3)] | None = Field(
        default=None,
        title="Loss spike threshold",
        description="Skip updates whose loss is this many robust standard deviations above the median of the last 128 losses, for"
        " example 8. null: never.",
        json_schema_extra=on_resume(Resume.EXACT),
    )

    @model_validator(mode="after")
    def _one_length(self) -> TrainingConfig:
        given = {name: getattr(self, name) for name in ("max_steps", "num_epochs", "max_tokens")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            settings = " and ".join(f"{name}={value}" for name, value in given.items())
            raise ValueError(f"{settings} both set the length of the run; set all but one to null")
        if not given:
            self.max_steps = 1000
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be fewer than max_steps={self.max_steps}")
        return self

    @model_validator(mode="after")
    def _exact_by_steps_alone(self) -> TrainingConfig:
        if self.early_stopping_patience is not None and duration(self.eval_every).unit == "seconds":
            raise ValueError(
                f"early_stopping_patience={self.early_stopping_patience} cannot be combined with "
                f"eval_every={self.eval_every}: when a run "
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
        if self.parallel != "deepspeed" and self.zero_stage is not None:
            raise ValueError(
                f"zero_stage={self.zero_stage} is given, but parallel={self.parallel}; use parallel=deepspeed"
            )
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
