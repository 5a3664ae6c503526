"""What the workers run on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from infini_llama.configs.schema.launchers import KubernetesConfig, NodeConfig, SlurmConfig
from infini_llama.configs.schema.section import Section, exact, free

HOST = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"


class EnvironmentConfig(Section):
    """What the workers run on. `auto` is decided by patch-environment and pinned for the run; any other value is used as
    it is, or refused.
    """

    device: Literal["auto", "cpu", "cuda"] = exact(
        default="auto",
        title="Device",
        description="auto: GPUs if available, otherwise the CPU.",
    )
    gpus: list[Annotated[int, Field(ge=0)]] | Literal["auto"] = free(
        default="auto",
        title="GPUs",
        description="Indices of the GPUs to train on. auto: those that no other process uses, or all if every GPU is "
        "in use.",
    )
    nproc_per_node: Annotated[int, Field(ge=1)] | Literal["auto"] = exact(
        default="auto",
        title="Workers per node",
        description="Number of torchrun workers per machine. auto: one per GPU, or one on a CPU.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = exact(
        default="auto",
        title="Precision",
        description="fp32, or autocast to bf16 or fp16 (with loss scaling) with fp32 weights. auto: bf16 on GPUs that support "
        "it and on CPUs that multiply it (AVX512-BF16, AMX, Arm), otherwise fp32.",
    )
    attention_backend: Literal["auto", "sdpa", "blocked", "varlen", "flash2"] = exact(
        default="auto",
        title="Attention backend",
        description="Implementation of softmax attention. auto: on GPUs in bf16 flash-attn 2 (flash2; with "
        "train.document_isolation also torch's varlen) if it agrees with sdpa in a trial, otherwise sdpa.",
    )
    allocator: Literal["auto", "system", "glibc", "tcmalloc", "jemalloc"] = exact(
        default="auto",
        title="Allocator",
        description="Memory allocator of CPU workers. glibc: glibc's, set to keep freed memory. auto: glibc where the system "
        "has it, otherwise system.",
    )
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = exact(
        default="auto",
        title="Threads",
        description="CPU threads per worker. auto: the usable cores divided by the workers.",
    )
    distributed_backend: Literal["auto", "gloo", "nccl"] = exact(
        default="auto",
        title="Communication backend",
        description="torch.distributed backend. auto: nccl on GPUs, gloo on CPUs.",
    )
    nnodes: Annotated[int, Field(ge=1, le=65536)] = exact(
        default=1,
        title="Nodes",
        description="Number of machines (nodes), each with environment.nproc_per_node workers. Start `infini-llama "
        "join RUN` on the other nodes.",
    )
    node_rank: Annotated[int, Field(ge=0)] | Literal["auto"] = free(
        default="auto",
        title="Node rank",
        description="Rank of this node, from 0. auto: 0 for the command that leads the run, a free rank for nodes "
        "that join.",
    )
    master_addr: Annotated[str, Field(pattern=HOST)] = free(
        default="auto",
        title="Master address",
        description="Host name or address of node 0 for the other nodes. auto: the address of its default route.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] | Literal["auto"] = free(
        default="auto",
        title="Port",
        description="Port of the rendezvous on node 0. auto: a free port.",
    )
    rendezvous: Literal["c10d", "static"] = free(
        default="c10d",
        title="Rendezvous",
        description="c10d: torchrun assigns node ranks, sorted by address. static: node ranks are "
        "environment.node_rank, and master_addr and port must be set; no other port is used.",
    )
    join_timeout: Annotated[float, Field(gt=0)] = free(
        default=600.0,
        title="Join timeout",
        description="Seconds that nodes wait for each other before an attempt fails.",
    )
    preflight_timeout: Annotated[float, Field(gt=0)] = free(
        default=120.0,
        title="Preflight timeout",
        description="Timeout of the connectivity check before the first step, in seconds; the error lists missing "
        "ranks. On one machine, it is at least environment.communication_timeout.",
    )
    communication_timeout: Annotated[float, Field(gt=0)] = free(
        default=600.0,
        title="Communication timeout",
        description="Timeout of collective operations during training, in seconds. The attempt then fails and is retried.",
    )
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default_factory=dict,
        title="Environment variables",
        description="Environment variables of the workers. They override the plan's variables. The value "
        "'{{ prefect.blocks.secret.NAME }}' is read from that Prefect Secret block where the run is executed.",
    )
    launcher: Literal["local", "slurm", "kubernetes"] = free(
        default="local",
        title="Launcher",
        description="How workers are started. local: torchrun on this machine. slurm: an sbatch job. kubernetes: a "
        "JobSet. A job continues if this command ends, and the next command with the same run name "
        "watches it.",
    )
    node: NodeConfig = Field(
        default_factory=NodeConfig,
        title="Node",
        description="Resources of each machine of the cluster, if the launcher is not local.",
    )
    slurm: SlurmConfig = Field(
        default_factory=SlurmConfig, title="Slurm", description="Job settings for environment.launcher=slurm."
    )
    kubernetes: KubernetesConfig = Field(
        default_factory=KubernetesConfig,
        title="Kubernetes",
        description="Job settings for environment.launcher=kubernetes.",
    )

    @model_validator(mode="after")
    def _nodes_can_meet(self) -> EnvironmentConfig:
        problems: list[str] = []
        if self.node_rank != "auto" and self.node_rank >= self.nnodes:
            problems.append(
                f"node_rank={self.node_rank}, but nnodes={self.nnodes} and they count from 0; use auto or at most {self.nnodes - 1}"
            )
        if self.nnodes == 1:
            if self.master_addr != "auto":
                problems.append(
                    f"master_addr={self.master_addr}, but nnodes=1 has no other node; use auto, or set nnodes"
                )
            if self.rendezvous == "static":
                problems.append("rendezvous=static is for several nodes, but nnodes=1; use c10d, or set nnodes")
        elif self.rendezvous == "static":
            for name in ("master_addr", "port"):
                if getattr(self, name) == "auto":
                    problems.append(
                        f"rendezvous=static with {name}=auto and nnodes={self.nnodes}: every node has to know it beforehand; give "
                        f"{name}, or use rendezvous=c10d"
                    )
        if problems:
            raise ValueError("; environment.".join(problems))
        return self
