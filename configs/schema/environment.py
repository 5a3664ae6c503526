"""The section `environment`: devices and processes of the workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from infini_llama.configs.attention_backends import ATTENTION_BACKENDS
from infini_llama.configs.choices import OneOf, descriptions
from infini_llama.configs.launchers import LAUNCHERS, Launcher
from infini_llama.configs.schema.section import Section, free, inexact

HOST = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
SRUN_OPTION = r"^--[a-z][a-z0-9-]*(=[^\n\r]*)?$"
# Options that the launcher sets itself, because it relies on them.
SET_BY_LAUNCHER = {
    "chdir",
    "cpus-per-task",
    "error",
    "export",
    "input",
    "job-name",
    "kill-on-bad-exit",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "output",
}


class EnvironmentConfig(Section):
    """Devices and processes of the workers. `auto` is decided by patch-environment and pinned for
    the run; any other value is used as it is, or refused.
    """

    device: Literal["auto", "cpu", "cuda"] = inexact(
        default="auto", description="auto: GPUs if available, otherwise the CPU."
    )
    gpus: list[Annotated[int, Field(ge=0)]] | Literal["auto"] = free(
        default="auto",
        description="Indices of the GPUs to train on. auto: those that no other process uses, or "
        "all if every GPU is in use.",
        min_length=1,
    )
    nproc_per_node: Annotated[int, Field(ge=1)] | Literal["auto"] = inexact(
        default="auto",
        description="Number of torchrun workers per machine. auto: one per GPU, or one on a CPU.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = inexact(
        default="auto",
        description="fp32, or autocast to bf16 or fp16 (with loss scaling) with fp32 weights. "
        "auto: bf16 on GPUs that support it and on CPUs that multiply it (AVX512-BF16, AMX, Arm), "
        "otherwise fp32.",
    )
    attention_backend: Annotated[str, OneOf(("auto", *ATTENTION_BACKENDS))] = inexact(
        default="auto",
        description="Implementation of softmax attention. auto: on GPUs in bf16 flash2 if it "
        "agrees with sdpa in a trial; on a CPU blocked where it is measured to be faster; "
        f"otherwise sdpa. {descriptions(ATTENTION_BACKENDS)}",
    )
    allocator: Literal["auto", "system", "glibc"] = inexact(
        default="auto",
        description="Memory allocator of CPU workers. glibc: glibc's, set to keep freed memory. "
        "auto: glibc where the system has it and no variable sets the same, otherwise system.",
    )
    threads: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = inexact(
        default="auto",
        description="CPU threads per worker. auto: the usable cores divided by the workers.",
    )
    distributed_backend: Literal["auto", "gloo", "nccl"] = inexact(
        default="auto",
        description="torch.distributed backend. auto: nccl on GPUs, gloo on CPUs.",
    )
    nnodes: Annotated[int, Field(ge=1, le=65536)] = inexact(
        default=1,
        description="Number of machines (nodes), each with environment.nproc_per_node workers. "
        "Start `infini-llama join RUN`, or the same command, on the other nodes.",
    )
    node_rank: Annotated[int, Field(ge=0)] | Literal["auto"] = free(
        default="auto",
        description="Rank of this node, from 0. The command with rank 0 supervises the run, those "
        "with other ranks join it. auto: read from PET_NODE_RANK, NODE_RANK, SLURM_NODEID or "
        "JOB_COMPLETION_INDEX, otherwise 0.",
    )
    master_addr: Annotated[str, Field(pattern=HOST)] = free(
        default="auto",
        description="Host name or address of node 0 for the other nodes. auto: the address of its "
        "default route.",
    )
    master_port: Annotated[int, Field(ge=1, le=65535)] | Literal["auto"] = free(
        default="auto",
        description="Port of the rendezvous on node 0. auto: a free port.",
    )
    communication_timeout: Annotated[float, Field(gt=0, le=1_000_000)] = free(
        default=600.0,
        description="Timeout of collective operations during training, in seconds. The attempt "
        "then fails and is retried.",
    )
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default_factory=dict,
        description="Environment variables of the workers. They override the plan's variables, but "
        "those of threads and GPUs: use environment.threads and environment.gpus. The value "
        "'{{ prefect.blocks.secret.NAME }}' is read from that Prefect Secret block where the run "
        "is executed.",
    )
    launcher: Annotated[str, OneOf(tuple(LAUNCHERS))] = free(
        default="local",
        description=f"How workers are started. {descriptions(LAUNCHERS)}",
    )
    srun_options: list[Annotated[str, Field(pattern=SRUN_OPTION)]] = free(
        default_factory=list,
        description="Options of srun for environment.launcher=srun, each as --name=value, for "
        "example --partition=gpu or --time=12:00:00.",
    )

    @property
    def started_by(self) -> Launcher:
        """What is known of `launcher`."""
        return LAUNCHERS[self.launcher]

    @field_validator("srun_options")
    @classmethod
    def _leave_the_options_of_the_launcher(cls, options: list[str]) -> list[str]:
        taken = [
            option
            for option in options
            if option.removeprefix("--").split("=")[0] in SET_BY_LAUNCHER
        ]
        if taken:
            raise ValueError(
                f"it contains {', '.join(taken)}, which the launcher sets itself; remove it"
            )
        return options

    @model_validator(mode="after")
    def _nodes_can_meet(self) -> EnvironmentConfig:
        problems: list[str] = []
        if self.node_rank != "auto" and self.node_rank >= self.nnodes:
            problems.append(
                f"node_rank={self.node_rank}, but nnodes={self.nnodes} and they count from 0; use "
                f"auto or at most {self.nnodes - 1}"
            )
        if self.nnodes == 1 and self.master_addr != "auto":
            problems.append(
                f"master_addr={self.master_addr}, but nnodes=1 has no other node; use auto, or set "
                "nnodes"
            )
        if self.srun_options and self.launcher != "srun":
            problems.append(
                f"environment.srun_options is set, but launcher={self.launcher}; set launcher=srun "
                "or remove the options"
            )
        if problems:
            raise ValueError(*problems)
        return self
