"""The sections that name text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from infini_llama.configs.schema.section import Section, fixed, free

Pattern = Annotated[str, Field(min_length=1)]  # an empty one would be the working directory
SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
# The keys that a source reads beside those that belong to every text.
READ_BY = {
    "files": ("files", "validation_files", "text_column", "format"),
    "python-stdlib": ("validation_files", "text_column", "format"),
    "huggingface": (
        "dataset",
        "dataset_config",
        "revision",
        "dataset_split",
        "validation_split",
        "streaming",
        "text_column",
    ),
    "passkey": ("passkey",),
}
OF_EVERY_TEXT = ("source", "loss_on", "answer_after")
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
    form: Literal["passkey", "facts", "overwritten", "variables"] = fixed(
        default="passkey",
        description="What is hidden. passkey: one number of five digits. facts: three things with "
        "a number each, of which one is asked for. overwritten: a number that is replaced by "
        "another, which is asked for. variables: a number that is asked for through two "
        "assignments.",
    )
    filler: Literal["repeated", "random", "files"] = fixed(
        default="repeated",
        description="The text around it. repeated: the same sentences again and again. random: "
        "their words in random order. files: consecutive words of the text in data.files, of which "
        "the first 8 MiB are used.",
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
        default_factory=list,
        description="Paths, folders or globs (** for any depth), relative to the working "
        "directory, or URLs of the same (s3://, gs://, hf://, https://). A txt, md, rst or py file "
        "is one document; json, jsonl (ndjson), csv, tsv, parquet and arrow files have one "
        "document per record. All can be compressed with gz, xz, zst or bz2. Files below "
        "runtime.home and the configuration itself are left out.",
    )
    validation_files: list[Pattern] = fixed(
        is_path=True,
        default_factory=list,
        description="Held-out text, in the same formats as data.files, instead of "
        "data.validation_fraction (source: files or python-stdlib). Training documents that are "
        "also in these files are skipped.",
    )
    dataset: str = fixed(
        is_path=True,
        default="",
        description="Name of a dataset on the Hugging Face Hub, a local dataset folder, or a "
        "folder written by save_to_disk (source: huggingface).",
    )
    dataset_config: str | None = fixed(
        default=None, description="Configuration of the dataset, if it has several."
    )
    revision: str | None = fixed(
        default=None,
        description="Branch, tag or commit of data.dataset on the Hugging Face Hub. Default: its "
        "main branch. The manifest records the commit that was read.",
        min_length=1,
    )
    dataset_split: str = fixed(
        default="train", description="Split of data.dataset to train on.", min_length=1
    )
    validation_split: str | None = fixed(
        default=None,
        description="Split of data.dataset to hold out (source: huggingface). Default: "
        "data.validation_fraction of data.dataset_split.",
    )
    streaming: bool = free(
        default=False,
        description="Read data.dataset without a local copy. The result is the same. For a Hub "
        "dataset, the contents of a commit are cached. Any other dataset is read again by every "
        "`run`, including a resume, to check for changes; `train --dataset` does not.",
    )
    passkey: PasskeyConfig = Field(default_factory=PasskeyConfig)
    text_column: str = fixed(
        default="text",
        description="Column or field that contains the text of a record.",
        min_length=1,
    )
    format: Literal["auto", "txt", "json", "jsonl", "csv", "parquet", "arrow"] = fixed(
        default="auto",
        description="Format of the files. auto: by file extension, which can also be md, rst, py, "
        "ndjson or tsv. The compression is always detected by the extension.",
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

    @property
    def unread_keys(self) -> list[str]:
        """The `set_keys` that `source` does not read."""
        read = (*OF_EVERY_TEXT, *READ_BY[self.source])
        if self.source == "passkey" and self.passkey.filler == "files":
            read += ("files", "text_column", "format")
        return [name for name in self.set_keys if name not in read]

    @model_validator(mode="after")
    def _held_out_text_is_read(self) -> TextConfig:
        for name in HELD_OUT:
            if name in self.unread_keys:
                other = next(
                    (f", or use {key}" for key in HELD_OUT if key in READ_BY[self.source]), ""
                )
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not read with source={self.source}; remove "
                    f"it{other}"
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
    license: str = free(
        default="not stated",
        description="License of the text, recorded in the manifest.",
        min_length=1,
    )
