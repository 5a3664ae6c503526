"""The sections `data` and `verify`: tokens and rows from text, and how much of that is checked."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, model_validator

from infini_llama.configs.choices import OneOf, descriptions
from infini_llama.configs.packing import ON_A_GPU, PACKED, PACKING
from infini_llama.configs.schema.section import Section, fixed, free
from infini_llama.configs.schema.sources import SourceConfig, TextConfig
from infini_llama.configs.schema.tokenizer import TokenizerConfig
from infini_llama.configs.text_formats import TEXT_FORMATS


class CurriculumStage(Section):
    """Shorter sequences at the beginning of a run."""

    sequence_length: Annotated[int, Field(ge=2, le=1_048_576)] = fixed(
        description="Tokens per sequence during this stage. data.sequence_length must be a "
        "multiple of it. Every step has the same number of tokens."
    )
    until: (
        Annotated[int, Field(ge=1, strict=True)]
        | Annotated[float, Field(gt=0, lt=1, strict=True)]
    ) = fixed(
        description="Last step of this stage: a step, or below 1 a fraction of the steps of the "
        "run. A fraction is fixed at the start; a later change of train.max_steps does not move it."
    )


class DataConfig(TextConfig):
    """Which text is read and how it becomes sequences of tokens."""

    sources: list[SourceConfig] = fixed(
        default_factory=list,
        description="Several sources instead of one, each with a name and its own files, dataset, "
        "format or text_column. No sequence contains text from two sources.",
    )
    min_length: Annotated[int, Field(ge=0)] = fixed(
        default=0,
        description="Documents with fewer characters are skipped and counted.",
    )
    deduplicate: bool = fixed(
        default=False,
        description="Keep only the first of several documents with exactly the same text. "
        "Duplicates are counted in either case.",
    )
    on_bad_input: Literal["fail", "skip"] = fixed(
        default="fail",
        description="fail: a damaged file or record ends the build with an error that names it. "
        "skip: it is skipped and counted, and the first ten places are named.",
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = fixed(
        default=0.05,
        description="Fraction of documents to hold out, chosen by a hash of their content.",
    )
    sequence_length: Annotated[int, Field(ge=2, le=1_048_576)] = fixed(
        default=256,
        description="Tokens per training sequence (context length, block size).",
    )
    packing: Annotated[str, OneOf(tuple(PACKING))] = fixed(
        default="concat",
        description=f"{descriptions(PACKING)} {', '.join(PACKED)}: the rest of a sequence is "
        "padding, and a document is cut only if it is longer than a sequence.",
    )
    stride: Annotated[int, Field(ge=1)] | None = fixed(
        default=None,
        description="Tokens from the start of one sequence to the start of the next (packing: "
        "window); at most sequence_length.",
    )
    curriculum: list[CurriculumStage] = fixed(
        default_factory=list,
        description="Stages of shorter sequences before data.sequence_length. Each stage reads the "
        "text from the beginning, in its own order.",
    )
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    num_workers: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = free(
        default="auto",
        description="Number of parts of the text that are read and tokenized at once. Up to four "
        "are threads of one process. More are processes, and so are those that read "
        f"{', '.join(form.name for form in TEXT_FORMATS.values() if form.holds_lock)} "
        "or a Hugging Face dataset. auto: by usable cores, free memory and amount of text; with "
        "dask and ray the workers of the cluster. The dataset does not depend on it.",
    )
    engine: Literal["local", "dask", "ray"] = free(
        default="local",
        description="local: this machine. dask, ray: workers of the cluster that "
        "DASK_SCHEDULER_ADDRESS or RAY_ADDRESS names, otherwise of a temporary one of "
        "data.num_workers workers on this machine (extras of the same names). The dataset does not "
        "depend on it.",
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = free(
        default="auto",
        description="Device that computes the row table: cpu, cuda or cuda:K. auto: the CPU. "
        f"{' and '.join(name for name in PACKING if name not in ON_A_GPU)} are computed on the "
        "CPU with any setting. The dataset does not depend on it.",
    )

    _not_text: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def not_text(self) -> dict[str, str]:
        """Files, folders and URLs of the run that are no text, and what each of them is.

        The home folder is not among them.
        """
        return self._not_text

    def leave_out(self, place: str, kind: str) -> None:
        """Name a file, folder or URL of the run that is no text.

        A pattern of text may match it nevertheless.
        """
        self._not_text[place] = kind

    @property
    def has_only_targets(self) -> bool:
        """Whether every position of a row is a target.

        Rows then have no padding, and no source has prompts.
        """
        return self.packing not in PACKED and all(
            text.loss_on == "all" for text in (self, *self.sources)
        )

    @model_validator(mode="after")
    def _sources_agree(self) -> DataConfig:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(
                f"sources={names} contains a duplicate name; give each source its own name"
            )
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError(
                f"sources={names}: only some have a weight; give a weight to all sources or to none"
            )
        single = self.set_keys
        if names and single:
            raise ValueError(
                f"{single[0]}={getattr(self, single[0])!r} is set beside sources={names}; write it "
                "below its source"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> DataConfig:
        for stage in self.curriculum:
            if self.sequence_length % stage.sequence_length:
                raise ValueError(
                    f"curriculum has a stage of {stage.sequence_length} tokens, which does not "
                    f"divide sequence_length={self.sequence_length}; choose a divisor"
                )
            if self.stride is not None and self.stride > stage.sequence_length:
                raise ValueError(
                    f"stride={self.stride} is more than the {stage.sequence_length} tokens of a "
                    "stage of curriculum: tokens would be left out"
                )
        ends = [stage.until for stage in self.curriculum]
        if len({end < 1 for end in ends}) > 1:
            raise ValueError(
                f"curriculum has stages that end at {ends}; give all of them steps, or all of them "
                "fractions"
            )
        if any(after <= before for before, after in pairwise(ends)):
            raise ValueError(
                f"curriculum has stages that end at {ends}; each stage must end later than the one "
                "before it"
            )
        return self

    @model_validator(mode="after")
    def _window_has_a_stride(self) -> DataConfig:
        if (self.packing == "window") != (self.stride is not None):
            raise ValueError(
                f"stride={self.stride} and packing={self.packing} do not agree: 'window' needs a "
                "stride, no other has one"
            )
        if self.stride is not None and self.stride > self.sequence_length:
            raise ValueError(
                f"stride={self.stride} is more than sequence_length={self.sequence_length}: tokens "
                "would be left out"
            )
        return self


class VerifyConfig(Section):
    """How much of the dataset is checked before training."""

    level: Literal["quick", "deep"] = free(
        default="quick",
        description="quick: manifests, sizes, the tokenizer, and the checksums of a dataset of up "
        "to 20 GB; of a larger one, each file's is checked when training first reads it. deep: "
        "every checksum and token, and decoded samples.",
    )
