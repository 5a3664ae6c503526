"""How long, over which batches and by which optimizer the model is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from infini_llama.configs.durations import count
from infini_llama.configs.schema.reporting import Count, ReportingConfig
from infini_llama.configs.schema.section import exact, fixed, free


class OptimizationConfig(ReportingConfig):
    """The keys of section `train` about steps, batches, the schedule and the optimizer."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = fixed(
        default=1234,
        title="Seed",
        description="Seed of the initial weights and of the sample order.",
    )
    init_from: str | None = fixed(
        default=None,
        title="Initial weights",
        description="Hugging Face folder of a Llama, or a folder written by export, with the initial weights "
        "(safetensors). `infini-llama import` writes a matching configuration. Default: random weights.",
        min_length=1,
    )
    init_gate: float | list[float] = exact(
        default=-2.0,
        title="Initial gates",
        description="Initial value of Infini-attention's gates, before the sigmoid, if train.init_from has none. -2 mixes in 12 %"
        " of the memory. A list has a value per layer and also sets the gates of random weights, which otherwise start at 0.",
    )
    max_steps: Annotated[int, Field(ge=1)] | None = exact(
        default=None,
        title="Steps",
        description="Optimizer steps of the run. Default: 1000, unless num_epochs or max_tokens is set.",
    )
    num_epochs: Annotated[float, Field(gt=0)] | None = exact(
        default=None,
        title="Epochs",
        description="Epochs over the training sequences, instead of max_steps. The order differs in every epoch.",
    )
    max_tokens: Count | None = exact(
        default=None,
        title="Tokens",
        description="Training tokens (targets), instead of max_steps, for example 300M.",
    )
    repeat_data: bool = free(
        default=True,
        title="Repeat data",
        description="Allow more than one epoch. false: a run that needs more than one is refused before its first "
        "step.",
    )
    global_batch_size: Annotated[int, Field(ge=1)] = fixed(
        default=32,
        title="Global batch size",
        description="Sequences per optimizer step, over all workers and accumulation steps.",
    )
    micro_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = exact(
        default=8,
        title="Micro-batch size",
        description="Sequences per forward pass of one worker (per-device batch size). auto: as many as fit into "
        "memory, by the estimate.",
    )
    document_masking: bool = exact(
        default=False,
        title="Document isolation",
        description="Isolate packed documents: attention stays inside each document, positions restart, and "
        "Infini-attention's memory is empty at its start.",
    )
    prefer_long_documents: Annotated[float, Field(ge=0, le=4)] = fixed(
        default=0.0,
        title="Prefer long documents",
        description="Oversample long documents: a document of twice the length is used 2 to this power times as "
        "often. 0: every sequence once per epoch. Needs about 36 bytes of memory per sequence and 30 per "
        "document at the start.",
    )
    dataloader_num_workers: Annotated[int, Field(ge=0, le=64)] = free(
        default=0,
        title="Data loader workers",
        description="Threads per worker that prepare the next batches, in pinned memory for a GPU. 0: none. The "
        "batches do not depend on it.",
    )
    learning_rate: Annotated[float, Field(gt=0)] = exact(
        default=1e-3,
        title="Learning rate",
        description="Peak learning rate, after the warm-up.",
    )
    lr_schedule: Literal["cosine", "linear", "constant", "polynomial", "inverse_sqrt", "wsd"] = exact(
        default="cosine",
        title="Schedule",
        description="Learning-rate schedule after the warm-up. wsd (warmup-stable-decay) stays at the peak until the "
        "last part of the run.",
    )
    lr_power: Annotated[float, Field(gt=0)] = exact(
        default=2.0,
        title="Polynomial power",
        description="Exponent of the polynomial schedule.",
    )
    lr_decay_ratio: Annotated[float, Field(gt=0, le=1)] = exact(
        default=0.2,
        title="Decay ratio",
        description="Fraction of all steps in which the wsd schedule decays.",
    )
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = exact(
        default=0.1,
        title="Final learning rate ratio",
        description="Final learning rate as a fraction of the peak.",
    )
    warmup_steps: Annotated[int, Field(ge=0)] = exact(
        default=100,
        title="Warm-up steps",
        description="Steps of linear warm-up from zero. Must be fewer than max_steps.",
    )
    optimizer: Literal["adamw", "adam", "sgd", "muon"] = exact(
        default="adamw",
        title="Optimizer",
        description="Optimizer. muon is used for the matrices of the layers, with adamw for all other parameters. In "
        "adam and sgd, weight decay is added to the gradient.",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = exact(
        default=0.95,
        title="Momentum",
        description="Momentum of sgd and muon.",
    )
    weight_decay: Annotated[float, Field(ge=0)] = exact(
        default=0.1,
        title="Weight decay",
        description="Weight decay of matrices. Norms, gates and embeddings have none.",
    )
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = exact(
        default=0.9,
        title="Adam beta 1",
        description="Decay of the first moment.",
    )
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = exact(
        default=0.95,
        title="Adam beta 2",
        description="Decay of the second moment.",
    )
    adam_epsilon: Annotated[float, Field(gt=0)] = exact(
        default=1e-8,
        title="Adam epsilon",
        description="Added to the denominator.",
    )
    gate_learning_rate: Annotated[float, Field(gt=0)] = exact(
        default=0.01,
        title="Gate learning rate",
        description="Peak learning rate of Infini-attention's gates, with the same schedule and without weight decay.",
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = exact(
        default=1.0,
        title="Gradient clipping",
        description="Gradient clipping: maximum norm of the gradient.",
    )

    def planned_steps(self, sequence_length: int) -> int:
        """About how many steps a run has, before its dataset is at hand: an epoch is taken for 1000, every position for a target."""
        if self.max_steps is not None:
            return self.max_steps
        if self.max_tokens is not None:
            return max(1, count(self.max_tokens) // (self.global_batch_size * sequence_length))
        return max(1, round(1000 * (self.num_epochs or 1.0)))

    @model_validator(mode="after")
    def _one_length(self) -> OptimizationConfig:
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
