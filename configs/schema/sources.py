"""The sections that name text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from infini_llama.configs.choices import OneOf
from infini_llama.configs.schema.section import (
    Section,
    fixed,
    free,
    inexact,
    readers_of,
)
from infini_llama.configs.text_formats import (
    DOCUMENT_ENDINGS,
    OTHER_ENDINGS,
    RECORD_ENDINGS,
    TEXT_FORMATS,
    listed,
)

Form = Literal[
    "passkey", "facts", "overwritten", "variables", "sentences", "niah_single"
]
# An empty one would be the working directory.
Pattern = Annotated[str, Field(min_length=1)]
SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
# Sources as the keys of `TextConfig` name them (`read_by`).
FILES = "files"
STDLIB = "python-stdlib"
HUB = "huggingface"
PASSKEY = "passkey"
PASSKEY_IN_FILES = "passkey with filler: files"
NOT_STATED = "not stated"  # license
HELD_OUT = ("validation_files", "validation_split")


class PasskeyConfig(Section):
    """Texts generated for `data.source: passkey`: something hidden in filler text, and a question
    for it at the end.
    """

    documents: Annotated[int, Field(ge=1, le=100_000_000)] = fixed(
        default=20_000, description="Number of texts to generate."
    )
    # With more repetitions, a text would be longer than a document may be (16 MiB), and would be
    # cut between what is hidden and the question for it.
    repetitions: Annotated[int, Field(ge=1, le=100_000)] = fixed(
        default=3,
        description="Maximum repetitions of the filler text. Each text draws its length, and cuts "
        "the filler between any two words.",
    )
    form: Form = fixed(
        default="passkey",
        description="What is hidden. passkey: one number of five digits. facts: three things with "
        "a number each, of which one is asked for. overwritten: a number that is replaced by "
        "another, which is asked for. variables: a number that is asked for through two "
        "assignments. sentences: the number of a thing, said once, in one of five sentences. "
        "niah_single: RULER's single needle, in its words.",
    )
    filler: Literal["repeated", "random", "files"] = fixed(
        default="repeated",
        description="The text around it. repeated: the same sentences again and again. random: "
        "their words in random order. files: consecutive words of the text in data.files, as it is "
        "written, without documents that are held out. 8 MiB are used, as much of each file.",
    )


class TextConfig(Section):
    """The place of one source's text, and how to read it."""

    source: Literal["files", "python-stdlib", "huggingface", "passkey"] = fixed(
        default="files",
        description="files: the paths in data.files. python-stdlib: the .py files of the running "
        "Python's standard library, without a download. huggingface: data.dataset, through the "
        "datasets library. passkey: texts generated as data.passkey describes.",
    )
    files: list[Pattern] = fixed(
        is_path=True,
        read_by=(FILES, PASSKEY_IN_FILES),
        default_factory=list,
        description="Paths, folders or globs (** for any depth), relative to the working "
        "directory, or URLs of the same (s3://, gs://, hf://, https://). A "
        f"{listed(DOCUMENT_ENDINGS, 'or')} file is one document; {listed(RECORD_ENDINGS, 'and')} "
        "files have one document per record. All can be compressed with gz, xz, zst or bz2. Files "
        "below runtime.home and the configuration itself are left out.",
    )
    validation_files: list[Pattern] = fixed(
        is_path=True,
        read_by=(FILES, STDLIB),
        default_factory=list,
        description="Held-out text, in the same formats as data.files, instead of "
        "data.validation_fraction (source: files or python-stdlib). Training documents that are "
        "also in these files are skipped.",
    )
    dataset: str = fixed(
        is_path=True,
        read_by=(HUB,),
        default="",
        description="Name of a dataset on the Hugging Face Hub, a local dataset folder, or a "
        "folder written by save_to_disk (source: huggingface).",
    )
    dataset_config: str | None = fixed(
        read_by=(HUB,),
        default=None,
        description="Configuration of the dataset, if it has several.",
    )
    revision: str | None = fixed(
        read_by=(HUB,),
        default=None,
        description="Branch, tag or commit of data.dataset on the Hub. Default: its main branch. "
        "The manifest records the commit that was read.",
        min_length=1,
    )
    dataset_split: str = fixed(
        read_by=(HUB,),
        default="train",
        description="Split of data.dataset to train on.",
        min_length=1,
    )
    validation_split: str | None = fixed(
        read_by=(HUB,),
        default=None,
        description="Split of data.dataset to hold out (source: huggingface). Default: "
        "data.validation_fraction of data.dataset_split.",
    )
    streaming: bool = free(
        read_by=(HUB,),
        default=False,
        description="Read data.dataset without a local copy. The result is the same. A local "
        "dataset that the datasets library itself reads is read again by every `run`, including a "
        "resume, to check for changes; `train --dataset` does not.",
    )
    passkey: PasskeyConfig = Field(
        default_factory=PasskeyConfig,
        json_schema_extra={"read_by": [PASSKEY, PASSKEY_IN_FILES]},
    )
    text_column: str = fixed(
        read_by=(FILES, STDLIB, HUB, PASSKEY_IN_FILES),
        default="text",
        description="Column or field that contains the text of a record.",
        min_length=1,
    )
    format: Annotated[str, OneOf(("auto", *TEXT_FORMATS))] = fixed(
        read_by=(FILES, STDLIB, PASSKEY_IN_FILES),
        default="auto",
        description="Format of the files. auto: by file extension, which can also be "
        f"{listed(OTHER_ENDINGS, 'or')}; a file with other content, such as a web page, is "
        "refused. The compression is always detected by the extension.",
    )
    loss_on: Literal["all", "answer"] = fixed(
        default="all",
        description="Labels that count in the loss. all: every token of a document. answer: only "
        "what follows the last data.answer_after of each document.",
    )
    answer_after: str = fixed(
        default="",
        description="Text that ends the prompt of a document (loss_on: answer), for example ' The "
        "pass key is'. What follows its last occurrence is the answer. Every document must contain "
        "it.",
    )

    @property
    def set_keys(self) -> list[str]:
        """The keys of one source's text that differ from their defaults."""
        fields = TextConfig.model_fields.items()
        return [
            name
            for name, field in fields
            if getattr(self, name) != field.get_default(call_default_factory=True)
        ]

    @model_validator(mode="after")
    def _keys_are_read(self) -> TextConfig:
        read = keys_read_by(self.source, self.passkey.filler)
        for name in self.set_keys:
            if name in read:
                continue
            value = getattr(self, name)
            if isinstance(value, PasskeyConfig):
                value = value.model_dump(exclude_defaults=True)
            instead = ""
            if name in HELD_OUT:
                instead = "".join(
                    f", or use {other}" for other in HELD_OUT if other in read
                )
            raise ValueError(
                f"{name}={value!r} is not read with source={self.source}; remove it{instead}"
            )
        return self

    @model_validator(mode="after")
    def _answers_have_a_beginning(self) -> TextConfig:
        if (self.loss_on == "answer") != bool(self.answer_after):
            raise ValueError(
                f"loss_on={self.loss_on} and answer_after={self.answer_after!r} do not agree: "
                "'answer' needs the text that ends the prompt, 'all' has none"
            )
        return self


def keys_read_by(source: str, filler: str = "repeated") -> set[str]:
    """The keys of a text that this source reads.

    Args:
        filler: of passkey, which may take it from files.
    """
    reader = PASSKEY_IN_FILES if source == PASSKEY and filler == "files" else source
    return {
        name
        for name, readers in readers_of(TextConfig).items()
        if not readers or reader in readers
    }


class SourceConfig(TextConfig):
    """One of several sources that are mixed."""

    name: Annotated[str, Field(pattern=SOURCE_NAME)] = fixed(
        description="Name of the source in the dataset, in reports and in metrics."
    )
    weight: Annotated[float, Field(gt=0, le=1_000_000)] | None = fixed(
        default=None,
        description="Share of the training sequences: weight / sum of weights. If no source has a "
        "weight, every sequence is used once per epoch.",
    )
    loss_weight: Annotated[float, Field(gt=0, le=1_000_000)] = inexact(
        default=1.0,
        description="How much each target of the source counts in training: a step's gradient is "
        "that of the weighted mean, sum(weight x loss) / sum(weight). Reported losses have no "
        "weights.",
    )
    license: str = free(
        default=NOT_STATED,
        description="License of the text, recorded in the manifest.",
        min_length=1,
    )
