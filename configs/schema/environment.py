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
    nproc_per_node: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        title="Processes",
        description="torchrun workers on this machine; auto: one a GPU, or one on a CPU.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        title="Precision",
        description="fp32, or bf16 autocast over fp32 weights; auto: bf16 on GPUs that have it, else fp32.",
    )
    attention_backend: Literal["auto", "sdpa", "blocked", "varlen", "flash2", "flash4"] = Field(
        default="auto", title="Attention backend", description="The function that computes softmax attention."
    )
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        title="Threads",
        description="CPU threads of each worker; auto: the usable cores over the processes.",
    )
    distributed_backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", title="Communication backend", description="auto: nccl on GPUs, gloo on CPUs."
    )
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default_factory=dict,
        title="Environment variables",
        description="Set for the workers only, over those of the plan.",
    )
