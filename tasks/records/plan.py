"""What the workers run on: the result of patch-environment."""

from typing import Literal

from infini_llama.tasks.records.record import Record

Severity = Literal["ok", "note", "warning", "error"]


class Finding(Record):
    """Something that was found out about a machine or a plan; `sentence`: what it means and how to fix it."""

    name: str
    value: str
    severity: str
    sentence: str


class EnvironmentPlan(Record):
    """Settings of a run's workers.

    Attributes:
        gpus: numbers of this machine's GPUs, one per process; empty on a CPU.
        micro_batch_size: sequences per forward pass of one process, as planned (an attempt may run with less).
        env: environment variables of the workers.
        reasons: why a setting has its value, by its name.
        patches: names of the patches that workers apply in their own process.
    """

    device: Literal["cpu", "cuda"]
    gpus: tuple[int, ...]
    nproc_per_node: int
    nnodes: int
    rendezvous: Literal["c10d", "static"]
    master_addr: str
    precision: Literal["fp32", "bf16", "fp16"]
    attention_backend: str
    allocator: str
    compile: str
    loss_chunk: int
    threads: int
    distributed_backend: str
    port: int | Literal["auto"]
    micro_batch_size: int
    accumulation_steps: int
    env: dict[str, str]
    reasons: dict[str, str]
    findings: tuple[Finding, ...]
    patches: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Worker processes over all nodes."""
        return self.nproc_per_node * self.nnodes
