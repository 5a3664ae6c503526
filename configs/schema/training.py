"""How the model is trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from infini_llama.configs.durations import DURATION, duration
from infini_llama.configs.schema.reporting import Count, ReportingConfig

Interval = Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=DURATION)]


class TrainingConfig(ReportingConfig):
    """How the model is trained. Batches: accumulation is derived as global / (micro x processes) and must be whole."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=1234, title="Seed", description="Decides initial weights and the order of samples."
    )
    init_from: str | None = Field(
        default=None,
        title="Start from",
        description="A Hugging Face folder of a Llama, or one that export wrote, whose weights the run starts with (safetensors); "
        "`infini-llama import` writes a configuration with the architecture of one. Default: random weights.",
        min_length=1,
    )
    init_gate: float = Field(
        default=-2.0,
        title="First gates",
        description="Infini-attention's gates, before the sigmoid, where train.init_from has none: -2 mixes in 12 % of what the "
        "memory holds. Texts of one segment never read it.",
    )
    max_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Steps",
        description="Optimizer steps of the whole run; default 1000, unless num_epochs or max_tokens says how long it is.",
    )
    num_epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        title="Epochs",
        description="Passes over the training rows, in place of max_steps; shuffled anew each time.",
    )
    max_tokens: Count | None = Field(
        default=None, title="Tokens", description="Targets to train on, in place of max_steps, for example 300M."
    )
    repeat_data: bool = Field(
        default=True,
        title="Repeat data",
        description="Whether a run may pass over the training rows more than once; false refuses one that would, before its first step.",
    )
    global_batch_size: Annotated[int, Field(ge=1)] = Field(
        default=32, title="Global batch", description="Sequences of one optimizer step, over all processes."
    )
    micro_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=8,
        title="Micro-batch",
        description="Sequences of one forward pass of one process; auto: as many as an estimate fits into the memory.",
    )
    document_isolation: bool = Field(
        default=False,
        title="Document isolation",
        description="Documents that share a row do not see one another: attention stays inside each, positions begin anew, and "
        "Infini-attention's memory is empty at its beginning. Off: the row is read as one text.",
    )
    prefer_long_documents: Annotated[float, Field(ge=0, le=4)] = Field(
        default=0.0,
        title="Prefer long documents",
        description="Rows of a document of about twice as many tokens are seen 2 to this power as often (1: twice as often); 0: every row "
        "once an epoch. Every process reads the beginnings of all documents at its start (a dataset above verify.full_below: checks "
        "every shard then), with about 36 bytes of memory a row, of which 8 stay, and 30 a document.",
    )
    dataloader_num_workers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0,
        title="Data loader workers",
        description="Threads of each process that build the batches of the steps to come, pinned for a GPU; 0: none. The batches and "
        "their order are the same with any number.",
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=1e-3, title="Learning rate", description="Peak rate, after the warm-up."
    )
    lr_schedule: Literal["cosine", "linear", "constant", "polynomial", "inverse_sqrt", "wsd"] = Field(
        default="cosine",
        title="Schedule",
        description="How the learning rate falls after the warm-up; wsd stays at the peak until the last part of the run.",
    )
    lr_power: Annotated[float, Field(gt=0)] = Field(
        default=2.0, title="Power", description="Exponent of the polynomial schedule."
    )
    lr_decay_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, title="Decay share", description="Share of all steps over which the wsd schedule falls."
    )
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, title="Final rate", description="The schedule ends at this share of the peak rate."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=100,
        title="Warm-up steps",
        description="Steps of linear warm-up from zero; must be fewer than max_steps.",
    )
    optimizer: Literal["adamw", "adam", "sgd", "muon"] = Field(
        default="adamw",
        title="Optimizer",
        description="muon is for the layers' matrices, with adamw for all else; the decay of adam and sgd is part of the gradient.",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.95, title="Momentum", description="Of sgd and muon."
    )
    weight_decay_embeddings: bool = Field(
        default=False,
        title="Decay embeddings",
        description="Whether the embedding has weight decay as the matrices have.",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1,
        title="Weight decay",
        description="Decay of matrices; norms and gates have none, embeddings by choice.",
    )
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9, title="Adam beta 1", description="Decay of the first moment."
    )
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.95, title="Adam beta 2", description="Decay of the second moment."
    )
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(
        default=1e-8, title="Adam epsilon", description="Added to the denominator."
    )
    gate_learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=0.01,
        title="Gate learning rate",
        description="Peak rate of Infini-attention's gates, an optimizer group of their own without weight decay; same schedule.",
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, title="Clip norm", description="Gradients are scaled down to this norm."
    )
    loss_chunk: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        title="Loss chunk",
        description="Tokens whose logits exist at a time; 0: all of a micro-batch; auto: 0 while they are few, else 256 on a CPU and "
        "4096 on a GPU.",
    )
    z_loss: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        title="z-loss",
        description="Weight of log^2 Z in the gradient, for example 1e-4, which keeps logits from drifting; reported losses are "
        "without it.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        title="Activation checkpointing",
        description="What a layer computes again in the backward pass to save memory: nothing, all but its matrix products, all.",
    )
    eval_every: Interval = Field(
        default=100,
        title="Evaluate every",
        description="Steps between validation losses, or for example '10M tokens' or '15 minutes'. A new lowest loss is saved at once.",
    )
    early_stopping_patience: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Patience",
        description="Validations in a row without a gain after which the run ends early; default: it never does.",
    )
    early_stopping_min_delta: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        title="Smallest gain",
        description="How much lower, in nats, a validation loss must be to count as a gain.",
    )
    save_every: Interval = Field(
        default=200,
        title="Save every",
        description="Steps between checkpoints, or for example '10M tokens' or '15 minutes'; the best model is saved besides.",
    )
    save_total_limit: Annotated[int, Field(ge=2)] = Field(
        default=3,
        title="Checkpoints kept",
        description="Newest checkpoints kept beside the best one; at least 2, so a damaged one has a predecessor.",
    )
    save_permanent_every: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Permanent every",
        description="Checkpoints at multiples of this many steps are kept for ever, beside train.save_total_limit; null: none.",
    )
    async_save: bool = Field(
        default=True,
        title="Asynchronous save",
        description="A checkpoint is copied to memory and written while training goes on; false: training waits, without the copy.",
    )
    parallel: Literal["ddp", "fsdp", "hsdp", "deepspeed"] = Field(
        default="ddp",
        title="Parallel strategy",
        description="ddp: every process holds the whole model; fsdp: its parameters, gradients and optimizer state are split over all "
        "processes (FSDP2); hsdp: split over train.shard_size of them, and copied over the groups; deepspeed: split by DeepSpeed's ZeRO "
        "(package infini-llama[deepspeed]).",
    )
    zero_stage: Literal[1, 2, 3] | None = Field(
        default=None,
        title="ZeRO stage",
        description="What train.parallel=deepspeed splits over all processes: optimizer state (1), gradients as well (2), parameters as "
        "well (3). Default: the stage in train.deepspeed_config, else 2.",
    )
    deepspeed_config: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = Field(
        default=None,
        title="DeepSpeed's JSON",
        description="A JSON file for DeepSpeed, or its contents. Its zero_optimization and communication settings are taken; what the "
        'run\'s own keys say (batch sizes, optimizer, precision, clipping) must agree with them, be "auto" or be left out.',
    )
    shard_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        title="Shard size",
        description="Processes that share one copy of the model under train.parallel=hsdp; auto: those of one machine.",
    )
    reshard_after_forward: bool = Field(
        default=True,
        title="Reshard after forward",
        description="Under fsdp and hsdp, a layer's parameters are freed between forward and backward (ZeRO-3); false keeps them "
        "(ZeRO-2: more memory, less communication).",
    )
    context_parallel: Annotated[int, Field(ge=1)] = Field(
        default=1,
        title="Context parallel",
        description="Processes that share each sequence, every one with a run of its segments; they pass on what Infini-attention's "
        "memory holds. For sequences whose activations do not fit one process; not with model.attention=softmax.",
    )
    compile: Literal["auto", "off", "block", "whole"] = Field(
        default="auto",
        title="Compile",
        description="torch.compile of each layer (block) or of model and loss (whole, not with fsdp or hsdp); used once its loss and "
        "gradients of a first batch agree with eager execution's; auto: off, or under environment.tune=full where it pays.",
    )
    max_skips: Annotated[int, Field(ge=0)] = Field(
        default=10,
        title="Skips borne",
        description="An update that is not finite is left out; more than this many in a window go back to the last good checkpoint.",
    )
    skip_window: Annotated[int, Field(ge=1)] = Field(
        default=100, title="Skip window", description="Steps over which left-out updates are counted."
    )
    spike_zscore: Annotated[float, Field(ge=3)] | None = Field(
        default=None,
        title="Loss spike",
        description="An update whose loss lies this many robust standard deviations above the median of the last 128 is left out like one "
        "that is not finite, for example 8; null: none is.",
    )

    @model_validator(mode="after")
    def _one_length(self) -> TrainingConfig:
        given = {name: getattr(self, name) for name in ("max_steps", "num_epochs", "max_tokens")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            said = " and ".join(f"{name}={value}" for name, value in given.items())
            raise ValueError(f"{said} both say how long the run is; set all but one to null")
        if not given:
            self.max_steps = 1000
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be fewer than max_steps={self.max_steps}")
        return self

    @model_validator(mode="after")
    def _exact_by_steps_alone(self) -> TrainingConfig:
        if self.early_stopping_patience is not None and duration(self.eval_every).unit == "seconds":
            raise ValueError(
                f"early_stopping_patience={self.early_stopping_patience} does not go with eval_every={self.eval_every}: when a run "
                "ends would depend on the clock; give steps or tokens"
            )
        if self.optimizer == "muon" and self.parallel != "ddp":
            raise ValueError(
                f"optimizer=muon needs whole matrices, which parallel={self.parallel} splits; use parallel=ddp"
            )
        if self.parallel == "deepspeed" and self.optimizer == "sgd":
            raise ValueError("optimizer=sgd does not go with parallel=deepspeed; use optimizer=adamw or adam")
        if self.parallel == "deepspeed" and self.context_parallel > 1:
            raise ValueError(
                f"context_parallel={self.context_parallel} does not go with parallel=deepspeed; use parallel=fsdp"
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
                f"compile={self.compile} does not go with parallel=deepspeed; use compile=off, or parallel=fsdp"
            )
        if self.compile == "whole" and self.parallel != "ddp":
            raise ValueError(
                f"compile=whole does not go with parallel={self.parallel}, which gathers parameters layer by layer; use compile=block"
            )
        return self
