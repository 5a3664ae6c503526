"""The environment of the workers.

The result of patch-environment, and what is kept of it for later attempts.
"""

from typing import Literal, Self

from pydantic import Field

from infini_llama.configs.reading import changed
from infini_llama.configs.secrets import masked
from infini_llama.tasks.records.decision import Decision
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.record import Record

Severity = Literal["error", "warning", "note", "ok"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note", "ok")
Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
Compile = Literal["off", "block", "whole"]


class Finding(Record):
    """A fact that was found out about a machine or a plan.

    Attributes:
        sentence: what it means and how to fix it.
    """

    name: str
    value: str | int
    severity: Severity = "ok"
    sentence: str = ""


def finding(
    name: str, value: str | int, severity: Severity = "ok", sentence: str = ""
) -> Finding:
    """A `Finding` by position."""
    return Finding(name=name, value=value, severity=severity, sentence=sentence)


class PinnedSettings(Record):
    """The settings that determine the bits of a result, beside seed and data.

    A run keeps what its first attempt had. The description of a field states how the result changes
    with it.

    Attributes:
        micro_batch_size: sequences per forward pass of one process, as planned (an attempt may run
            with less).
    """

    device: Device = Field(description="another device computes with other kernels")
    nproc_per_node: int = Field(
        description="the same samples come in the same order, but gradients are summed in another "
        "order"
    )
    nnodes: int = Field(
        default=1,
        description="the same samples come in the same order, but gradients are summed in another "
        "order",
    )
    precision: Precision = Field(description="numbers are rounded differently")
    attention_backend: str = Field(
        description="attention is computed by another function"
    )
    compile: Compile = Field(
        default="off", description="compiled code rounds differently"
    )
    micro_batch_size: int = Field(
        description="gradients are summed over other parts of a batch"
    )
    loss_chunk: int = Field(
        default=0,
        description="the head's gradient is summed over other parts of a batch",
    )
    threads: int = Field(description="sums are split differently between the threads")
    allocator: str = Field(
        default="system",
        description="kernels may take another path where tensors lie differently in memory",
    )

    @property
    def world_size(self) -> int:
        """Worker processes over all nodes."""
        return self.nproc_per_node * self.nnodes


class EnvironmentPlan(PinnedSettings):
    """Settings of a run's workers.

    Attributes:
        gpus: numbers of this machine's GPUs, one per process; empty on a CPU.
        keep_attention_weights: attention_backend=blocked keeps its softmax weights for the backward
            pass, instead of computing them again with the same bits.
        env: environment variables of the workers.
        choices: those that were made for the configuration, in the order in which they depend on
            one another.
        findings: warnings and notes about this plan.
        patches: names of the patches that workers apply in their own process.
    """

    gpus: tuple[int, ...]
    keep_attention_weights: bool = True
    master_addr: str = "auto"
    distributed_backend: str
    port: int | Literal["auto"] = "auto"
    env: dict[str, str] = Field(default_factory=dict)
    choices: tuple[Decision, ...] = ()
    findings: tuple[Finding, ...] = ()
    patches: tuple[str, ...] = ()

    def pinned(self) -> PinnedSettings:
        """The settings that later attempts keep."""
        return PinnedSettings.model_validate(self.to_json())

    def masked(self) -> Self:
        """The plan as it may be written down and shown.

        Values of `env` that may be secret are masked.
        """
        return changed(self, env=masked(self.env))


class PatchSummary(Record):
    """A patch that the run's workers apply.

    Attributes:
        reference: where the fault is described upstream.
    """

    name: str
    fault: str
    reference: str


class EnvironmentRecord(Record):
    """The content of environment.json, written by the training stage once it has locked the run.

    Attributes:
        pinned_at: ISO 8601, of the first attempt.
        plan: of the last attempt; values of `env` are masked.
    """

    pinned: PinnedSettings
    pinned_at: str
    plan: EnvironmentPlan
    patches: tuple[PatchSummary, ...] = ()
    facts: MachineFacts


class PlannedEnvironment(Record):
    """The result of patch-environment.

    Attributes:
        plan: with the real values of `env`.
        record: to be written by the training stage.
    """

    plan: EnvironmentPlan
    record: EnvironmentRecord
