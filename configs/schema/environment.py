"""What the workers run on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from infini_llama.configs.schema.launchers import KubernetesConfig, NodeConfig, SlurmConfig
from infini_llama.configs.schema.section import Section

HOST = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"


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
    nnodes: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=1,
        title="Nodes",
        description="Machines that train together, each with environment.nproc_per_node workers; on the others `infini-llama join RUN` "
        "is started.",
    )
    node_rank: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        title="Node rank",
        description="Which of the nodes this machine is, from 0; auto: the first for a command that leads the run, a free one for "
        "those that join.",
    )
    master_addr: Annotated[str, Field(pattern=HOST)] = Field(
        default="auto",
        title="Master address",
        description="Name or address of the first node, as the others reach it; auto: the one by which it goes out.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] | Literal["auto"] = Field(
        default="auto",
        title="Port",
        description="Where the workers meet on this machine, or the nodes on the first one; auto: a port that is free.",
    )
    rendezvous: Literal["c10d", "static"] = Field(
        default="c10d",
        title="Rendezvous",
        description="How several nodes meet: c10d: torchrun gives out the ranks, sorted by address; static: by environment.node_rank, at "
        "an address and port that are given, and no port beside that one is needed for it.",
    )
    join_timeout: Annotated[float, Field(gt=0)] = Field(
        default=600.0,
        title="Join timeout",
        description="Seconds that the nodes of a run wait for each other before an attempt is given up.",
    )
    preflight_timeout: Annotated[float, Field(gt=0)] = Field(
        default=120.0,
        title="Preflight timeout",
        description="Seconds that workers have to answer each other before the first step; those that do not are named. On one machine "
        "at least environment.communication_timeout.",
    )
    communication_timeout: Annotated[float, Field(gt=0)] = Field(
        default=600.0,
        title="Communication timeout",
        description="Seconds that a worker waits for another during training before the attempt is given up and made again.",
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
    launcher: Literal["local", "slurm", "kubernetes"] = Field(
        default="local",
        title="Launcher",
        description="What starts the workers: local: torchrun on this machine; slurm: a job submitted by sbatch; kubernetes: a "
        "JobSet. A job outlives this command, and the next one of the same run name watches it.",
    )
    node: NodeConfig = Field(
        default_factory=NodeConfig,
        title="Node",
        description="What each machine of the cluster has, where a launcher other than local trains on it.",
    )
    slurm: SlurmConfig = Field(
        default_factory=SlurmConfig, title="Slurm", description="The job of environment.launcher=slurm."
    )
    kubernetes: KubernetesConfig = Field(
        default_factory=KubernetesConfig,
        title="Kubernetes",
        description="The job of environment.launcher=kubernetes.",
    )

    @model_validator(mode="after")
    def _nodes_can_meet(self) -> EnvironmentConfig:
        problems = []
        if self.node_rank != "auto" and self.node_rank >= self.nnodes:
            problems.append(
                f"node_rank={self.node_rank}, but nnodes={self.nnodes} and they count from 0; use auto or at most {self.nnodes - 1}"
            )
        if self.nnodes == 1:
            if self.master_addr != "auto":
                problems.append(f"master_addr={self.master_addr}, but nnodes=1 meets nobody; use auto, or set nnodes")
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
