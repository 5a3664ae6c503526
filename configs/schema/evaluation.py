"""What is measured of the trained model at the end of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from infini_llama.configs.schema.section import Section, free


class EvaluationConfig(Section):
    """What is measured of the trained model at the end of a run."""

    after_training: list[Literal["perplexity", "passkey"]] = free(
        default_factory=list,
        description="Evaluations after training: perplexity (on the validation sequences), passkey (retrieval). An "
        "Infini-Llama is evaluated with and without memory. Empty: none.",
    )
    sequences: Annotated[int, Field(ge=1)] | None = free(
        default=None, description="Number of validation sequences for perplexity. null: all."
    )
    passkey_lengths: list[Annotated[int, Field(ge=1)]] = free(
        default_factory=list,
        description="Lengths of the passkey texts in tokens. Empty: 1, 2, 4 and 8 sequence lengths.",
    )
