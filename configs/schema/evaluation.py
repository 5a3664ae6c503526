"""What is measured of the trained model at the end of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from infini_llama.configs.schema.section import Section


class EvaluationConfig(Section):
    """What is measured of the trained model at the end of a run."""

    after_training: list[Literal["perplexity", "passkey"]] = Field(
        default_factory=list,
        title="After training",
        description="Measurements that follow training: perplexity on the held-out rows, passkey retrieval; for an Infini-Llama with its "
        "memory and without. Empty: none.",
    )
    checkpoint: Literal["latest", "best"] = Field(
        default="latest", title="Checkpoint", description="Which of the run's checkpoints is measured."
    )
    sequences: Annotated[int, Field(ge=1)] | None = Field(
        default=None, title="Rows", description="Perplexity: the first so many held-out rows; null: all."
    )
    passkey_lengths: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list, title="Lengths of passkey texts", description="In tokens; empty: 1, 2, 4 and 8 rows."
    )
    passkey_samples: int = Field(
        default=10, ge=1, title="Passkeys", description="Numbers to find for each length and depth."
    )
