"""What the workers run on: the result of patch-environment."""

from typing import Literal

from pydantic import Field

from infini_llama.tasks.records.record import Record

Severity = Literal["error", "warning", "note", "ok"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note", "ok")
Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
Compile = Literal["off", "block", "whole"]


class Finding(Record):
    """Something that was found out about a machine or a plan; `sentence`: what it means and how to fix it."""

    name: str
    value: str | int
    severity: Severity = "ok"
    sentence: str = ""


def finding(name: str, value: str | int, severity: Severity = "ok", sentence: str = "") -> Finding:
    """A `Finding` by position."""
    return Finding(name=name, value=value, severity=severity, sentence=sentence)


class EnvironmentPlan(Record):
    """Settings of a run's workers.

    Attributes:
        gpus: numbers of this machine's GPUs, one per process; empty on a CPU.
        micro_batch_size: sequences per forward pass of one process, as planned (an attempt may run with less).
        env: environment variables of the workers.
        reasons: why a setting has its value, by its name.
        findings: warnings and notes about this plan.
        patches: names of the patches that workers apply in their own process.
    """

    device: Device
    gpus: tuple[int, ...]
    nproc_per_node: int
    nnodes: int = 1
    master_addr: str = "auto"
    precision: Precision
    attention_backend: str
    allocator: str = "system"
    compile: Compile = "off"
    loss_chunk: int = 0
    threads: int
    distributed_backend: str
    port: int | Literal["auto"] = "auto"
    micro_batch_size: int
    accumulation_steps: int
    env: dict[str, str] = Field(default_factory=dict)
    reasons: dict[str, str] = Field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    patches: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Worker processes over all nodes."""
        return self.nproc_per_node * self.nnodes
