"""What the workers run on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.schema.section import Section


class EnvironmentConfig(Section):
    """What the workers run on. 'auto' is decided by patch-environment and pinned by the run; anything else is taken or refused."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", title="Device", description="auto: GPUs where they work, else the CPU."
    )
    gpus: list[Annotated[int, Field(ge=0)]] | Literal["auto"] = Field(
        default="auto",
        title="GPUs",
        description="Numbers of the GPUs that train; auto: those that nobody else uses, or all where none is free.",
    )
    nproc_per_node: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        title="Processes",
        description="torchrun workers on this machine; auto: one a GPU, or one on a CPU.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        title="Precision",
        description="fp32, or autocast over fp32 weights in bf16 or in fp16 (with loss scaling); auto: bf16 on GPUs that have "
        "it, and under environment.tune on CPUs that compute in it; else fp32.",
    )
    attention_backend: Literal["auto", "sdpa", "blocked", "varlen", "flash2", "flash4"] = Field(
        default="auto",
        title="Attention backend",
        description="The function that computes softmax attention; auto: sdpa, or under environment.tune the fastest of those that "
        "compute rightly here.",
    )
    allocator: Literal["auto", "system", "tcmalloc", "jemalloc"] = Field(
        default="auto",
        title="Allocator",
        description="What gives a worker on a CPU its memory; auto: the system's, or under environment.tune one that is installed.",
    )
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        title="Threads",
        description="CPU threads of each worker; auto: the usable cores over the processes.",
    )
    distributed_backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", title="Communication backend", description="auto: nccl on GPUs, gloo on CPUs."
    )
    port: Annotated[int, Field(ge=1, le=65535)] | Literal["auto"] = Field(
        default="auto", title="Port", description="Where the workers meet on this machine; auto: a port that is free."
    )
    tune: Literal["off", "quick", "full"] = Field(
        default="off",
        title="Tune",
        description="What auto may choose for speed: off: nothing; quick: what this machine is known to compute faster with, attention "
        "tried; full: also compilation, threads or processes and the allocator, measured for at most 5 % of the run's time.",
    )
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default_factory=dict,
        title="Environment variables",
        description="Set for the workers only, over those of the plan.",
    )
