"""What a training run says of itself while it goes on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from infini_llama.configs.durations import COUNT
from infini_llama.configs.schema.section import Section, free

Count = Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=COUNT)]


class ReportingConfig(Section):
    """The part of `train` that does not change what is computed."""

    log_every: Annotated[int, Field(ge=1)] = free(
        default=10,
        title="Log every",
        description="Steps between lines on the console (loss, learning rate, tokens per second) and in TensorBoard. "
        "metrics.jsonl has every step.",
    )
    report_to: list[Literal["tensorboard", "wandb"]] = free(
        default=["tensorboard"],
        title="Report to",
        description="Loggers in addition to metrics.jsonl: tensorboard, wandb (the extra `wandb`; offline with "
        "WANDB_MODE=offline).",
    )
    metrics_hook: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = free(
        default=None,
        title="Metrics hook",
        description="A function (module:function) that every worker calls at logged steps with the model and the "
        "step's record. It returns a dict of numbers, which are logged under custom.",
    )
    profile_steps: list[Annotated[int, Field(ge=1)]] | None = free(
        default=None,
        title="Profile",
        description="First and last step for torch's profiler, for example [20, 24]. Traces and a table are written "
        "to `profile` in the run's folder.",
    )
    eval_tokens: Count | None = free(
        default=None,
        title="Evaluation tokens",
        description="Validation tokens per evaluation, for example 1M; the same each time. Default: 64 sequences.",
    )
    sample_prompts: list[Annotated[str, Field(min_length=1)]] = free(
        default=["def "],
        title="Sample prompts",
        description="Prompts that the model continues at each evaluation and at the end. The texts are in samples.jsonl, "
        "result.json and the report. Empty: no samples.",
    )
    sample_tokens: Annotated[int, Field(ge=1)] = free(
        default=128,
        title="Sample length",
        description="Tokens per sample.",
    )

    @model_validator(mode="after")
    def _a_span_of_steps(self) -> ReportingConfig:
        span = self.profile_steps
        if span is not None and (len(span) != 2 or span[0] > span[1]):
            raise ValueError(f"profile_steps={span} is not a first and a last step, for example [20, 24]")
        return self
