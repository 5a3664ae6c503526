"""What a training run says of itself while it goes on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from infini_llama.configs.durations import COUNT
from infini_llama.configs.schema.section import Section

Count = Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=COUNT)]


class ReportingConfig(Section):
    """The part of `train` that changes nothing of what is computed."""

    log_every: Annotated[int, Field(ge=1)] = Field(
        default=10,
        title="Log every",
        description="Steps between lines on the console (loss, learning rate, tokens per second) and in TensorBoard; metrics.jsonl has "
        "every step.",
    )
    report_to: list[Literal["tensorboard", "wandb"]] = Field(
        default=["tensorboard"],
        title="Report to",
        description="Where curves are drawn beside metrics.jsonl, which is always written: tensorboard, wandb (the extra 'wandb'; offline "
        "with WANDB_MODE=offline).",
    )
    metrics_hook: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = Field(
        default=None,
        title="Metrics hook",
        description="A function, as module:function, that every worker calls at the steps that are logged with the model and the step's "
        "record; the numbers it returns by name are reported under custom.",
    )
    profile_steps: list[Annotated[int, Field(ge=1)]] | None = Field(
        default=None,
        title="Profile",
        description="First and last step that torch's profiler records, for example [20, 24]; traces and a table stand in the run's "
        "folder profile.",
    )
    eval_sequences: Annotated[int, Field(ge=1)] = Field(
        default=64,
        title="Evaluation sequences",
        description="Validation rows per evaluation, the same ones each time; fewer if there are fewer.",
    )
    eval_tokens: Count | None = Field(
        default=None,
        title="Evaluation tokens",
        description="Held-out targets per evaluation, for example 1M, in place of eval_sequences: the first rows that have so many.",
    )
    sample_prompt: str = Field(
        default="def ",
        title="Sample prompt",
        description="Text that the finished model continues, as a first look at it.",
        min_length=1,
    )
    sample_prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        title="More prompts",
        description="Further texts that the finished model continues, as many tokens each; they stand in result.json and on the run's "
        "page.",
    )
    sample_tokens: Annotated[int, Field(ge=1)] = Field(
        default=128, title="Sample length", description="Tokens of each sample."
    )
    sample_at_evaluation: bool = Field(
        default=True,
        title="Samples on the way",
        description="Whether the prompts are continued at each evaluation, into samples.jsonl and the run's page.",
    )

    @model_validator(mode="after")
    def _a_span_of_steps(self) -> ReportingConfig:
        span = self.profile_steps
        if span is not None and (len(span) != 2 or span[0] > span[1]):
            raise ValueError(f"profile_steps={span} is not a first and a last step, for example [20, 24]")
        return self
