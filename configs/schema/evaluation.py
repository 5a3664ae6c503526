"""What is measured of the trained model at the end of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from infini_llama.configs.schema.section import Resume, Section, on_resume


class EvaluationConfig(Section):
    """What is measured of the trained model at the end of a run."""

    after_training: list[Literal["perplexity", "passkey"]] = Field(
        default_factory=list,
        title="After training",
        description="Evaluations after training: perplexity (on the validation sequences), passkey (retrieval). An "
        "Infini-Llama is evaluated with and without memory. Empty: none.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    checkpoint: Literal["latest", "best"] = Field(
        default="latest",
        title="Checkpoint",
        description="Checkpoint to evaluate.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    sequences: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Sequences",
        description="Number of validation sequences for perplexity. null: all.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    passkey_lengths: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list,
        title="Passkey lengths",
        description="Lengths of the passkey texts in tokens. Empty: 1, 2, 4 and 8 sequence lengths.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    passkey_samples: int = Field(
        default=10,
        ge=1,
        title="Passkeys",
        description="Number of passkeys per length and depth.",
        json_schema_extra=on_resume(Resume.FREE),
    )
