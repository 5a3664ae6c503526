"""The section `evaluate`: measurements of the trained model at the end of a run, and its export."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from infini_llama.configs.schema.section import Section, free


class EvaluationConfig(Section):
    """Measurements of the trained model at the end of a run, and its export."""

    after_training: list[Literal["perplexity", "passkey", "export"]] = free(
        default_factory=list,
        description="What follows training: perplexity (on the validation sequences), passkey "
        "(retrieval), export (a folder for transformers, export in the run's folder). The newest "
        "checkpoint is used. An Infini-Llama is evaluated with and without memory. Empty: nothing.",
    )
    sequences: Annotated[int, Field(ge=1)] | None = free(
        default=None,
        description="Number of validation sequences for perplexity, drawn from all. null: all.",
    )
    passkey_lengths: list[Annotated[int, Field(ge=1)]] = free(
        default_factory=list,
        description="Lengths of the passkey texts in tokens. Empty: 1, 2, 4 and 8 sequence "
        "lengths.",
    )

    @property
    def measurements(self) -> list[Literal["perplexity", "passkey"]]:
        return [kind for kind in self.after_training if kind != "export"]

    @property
    def exports(self) -> bool:
        return "export" in self.after_training
