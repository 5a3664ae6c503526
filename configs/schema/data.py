"""Which text is read, how it becomes tokens and rows, and how much of that is checked."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import ByteSize, Field, model_validator

from infini_llama.configs.schema.section import Section
from infini_llama.configs.schema.tokenizer import TokenizerConfig

SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class PasskeyConfig(Section):
    """Texts made for data.source=passkey: a number hidden among words that repeat, and asked for at the end."""

    documents: Annotated[int, Field(ge=1, le=100_000_000)] = Field(
        default=20_000, title="Documents", description="How many texts are made."
    )
    repetitions: Annotated[int, Field(ge=1)] = Field(
        default=3,
        title="Repetitions",
        description="The most times that the filler stands in a text; each text draws its own number from 1 on.",
    )
    seed: Annotated[int, Field(ge=0)] = Field(
        default=0, title="Seed", description="Decides the keys, lengths and places."
    )


class TextConfig(Section):
    """Where the text of one source is, and where in it."""

    source: Literal["files", "python-stdlib", "huggingface", "passkey"] = Field(
        default="files",
        title="Source",
        description="'files' reads the paths of data.files; 'python-stdlib' reads the .py files of the running Python's own "
        "standard library: real text on every machine without a download; 'huggingface' reads data.dataset through `datasets`; "
        "'passkey' makes the texts of data.passkey.",
    )
    files: list[str] = Field(
        default_factory=list,
        title="Files",
        description="Paths, folders or globs (** for any depth), relative to the working directory: txt, md, rst and py are a document "
        "a file; json, jsonl, csv, parquet and arrow a document a record; each also as gz, xz or zst.",
    )
    validation_files: list[str] = Field(
        default_factory=list,
        title="Validation files",
        description="Held-out text of your own, in the same forms as data.files; data.validation_fraction then holds out nothing, "
        "and training text that is also in these files is left out.",
    )
    dataset: str = Field(
        default="",
        title="Dataset",
        description="A Hugging Face dataset's name, a local folder of one, or a folder written by save_to_disk (source: huggingface).",
    )
    dataset_config: str | None = Field(
        default=None, title="Dataset configuration", description="The dataset's configuration, where it has several."
    )
    dataset_split: str = Field(
        default="train", title="Dataset split", description="The split of data.dataset that is read.", min_length=1
    )
    validation_split: str | None = Field(
        default=None,
        title="Validation split",
        description="The split of data.dataset that is held out; default: data.validation_fraction of data.dataset_split.",
    )
    streaming: bool = Field(
        default=False,
        title="Streaming",
        description="Whether data.dataset is read from where it is, without the copy that `datasets` keeps on this machine, with the same "
        "bytes. Nothing of it is remembered: `run` reads all of it to look for the finished dataset (a resume, too, which so needs the "
        "hub; `train --dataset` does not); where there is none once more each to plan, to build and to train a tokenizer, and to tokenize "
        "once for each process and split.",
    )
    passkey: PasskeyConfig = Field(
        default_factory=PasskeyConfig, title="Passkey", description="Which texts are made (source: passkey)."
    )
    text_column: str = Field(
        default="text",
        title="Text column",
        description="The column or field that holds the text of a record.",
        min_length=1,
    )
    format: Literal["auto", "txt", "json", "jsonl", "csv", "parquet", "arrow"] = Field(
        default="auto",
        title="Format",
        description="What the files are, whatever they are called; auto: what each file's name says. The compression is always the name's.",
    )


class SourceConfig(TextConfig):
    """One of several sources that are mixed."""

    name: Annotated[str, Field(pattern=SOURCE_NAME)] = Field(
        title="Name", description="What the source is called in the dataset, in reports and beside its weight."
    )
    weight: Annotated[float, Field(gt=0, le=1_000_000)] | None = Field(
        default=None,
        title="Weight",
        description="Its share of the training rows is weight / sum of weights, exactly; default for all: every row once an epoch.",
    )
    licence: str = Field(
        default="not stated",
        title="Licence",
        description="Under which licence the text is used, for the manifest.",
        min_length=1,
    )


class CurriculumStage(Section):
    """Rows of another length at the beginning of a run."""

    sequence_length: Annotated[int, Field(ge=2, le=1_048_576)] = Field(
        title="Sequence length",
        description="Tokens of one row during this stage; data.sequence_length must be a multiple of it, and each sequence of a batch "
        "becomes as many rows, so that a step has as many tokens as later.",
    )
    until_step: Annotated[int, Field(ge=1)] | None = Field(
        default=None, title="Until step", description="The last step of this stage."
    )
    until_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        title="Until fraction",
        description="The same as a share of the steps that the run begins with; a later train.max_steps does not move it.",
    )

    @model_validator(mode="after")
    def _ends_once(self) -> CurriculumStage:
        if (self.until_step is None) == (self.until_fraction is None):
            raise ValueError(
                f"until_step={self.until_step} and until_fraction={self.until_fraction}: a stage has one of them"
            )
        return self


class DataConfig(TextConfig):
    """Which text is read and how it becomes rows of tokens."""

    sources: list[SourceConfig] = Field(
        default_factory=list,
        title="Sources",
        description="Several sources instead of one, each with a name and with files, dataset, format or text_column of its own; "
        "rows never hold text of two sources, and weights decide how often each is seen.",
    )
    min_length: Annotated[int, Field(ge=0)] = Field(
        default=0, title="Shortest document", description="Documents of fewer characters are left out, and counted."
    )
    deduplicate: bool = Field(
        default=False,
        title="Drop duplicates",
        description="Of documents with exactly the same text only the first is kept; they are counted in any case.",
    )
    on_bad_input: Literal["fail", "skip"] = Field(
        default="fail",
        title="Bad input",
        description="fail: a damaged file or record ends the build with its name; skip: it is left out, named and counted.",
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.05,
        title="Validation fraction",
        description="Share of documents held out, chosen by a hash of their content.",
    )
    sequence_length: Annotated[int, Field(ge=2, le=1_048_576)] = Field(
        default=256, title="Sequence length", description="Tokens the model sees in one row."
    )
    strategy: Literal["concat", "window", "greedy", "first_fit", "best_fit", "padded"] = Field(
        default="concat",
        title="Chunking",
        description="concat: documents joined by the end-of-text token and cut into rows; window: the same with rows that overlap "
        "(data.stride); greedy, first_fit and best_fit: whole documents packed into rows, only those longer than a row cut, the "
        "rest of a row padding that is never a target (best_fit leaves the least); padded: a row for each document.",
    )
    stride: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Stride",
        description="Tokens from one row's beginning to the next one's (strategy: window); at most sequence_length.",
    )
    curriculum: list[CurriculumStage] = Field(
        default_factory=list,
        title="Curriculum",
        description="Stages of shorter rows, one after the other, before rows of data.sequence_length; each reads the text from the "
        "beginning of an order of its own.",
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, title="Tokenizer", description="How text becomes tokens."
    )
    tokenizer_engine: Literal["auto", "tokenizers", "gigatoken"] = Field(
        default="auto",
        title="Tokenizing engine",
        description="What encodes the text: auto takes the fastest that is installed (the extra 'fast') and gives the same tokens as "
        "`tokenizers`, which is checked; an engine that differs is replaced by `tokenizers`. The bytes are the same with each.",
    )
    shard_size: ByteSize = Field(
        default=ByteSize(256 * 1024**2),
        title="Shard size",
        description="Upper bound of one token shard, for example 256MiB.",
        ge=1024,
    )
    num_workers: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1,
        title="Preprocessing workers",
        description="Processes that tokenize, each its share of the shards; the bytes are the same with any number of them.",
    )
    engine: Literal["local", "dask", "ray"] = Field(
        default="local",
        title="Preprocessing engine",
        description="Who tokenizes: processes of this machine, or the workers of a Dask or Ray cluster (the extras dask and ray), which "
        "must see runtime.home and the text; the bytes are the same with each.",
    )
    engine_address: str | None = Field(
        default=None,
        title="Cluster's address",
        description="Of the Dask scheduler (tcp://host:8786) or the Ray cluster (host:6379); default: one of data.num_workers workers is "
        "started on this machine for the build.",
        min_length=1,
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = Field(
        default="auto",
        title="Chunking device",
        description="Where the row table is computed: auto (a GPU where there is one and the table is large), cpu, cuda or cuda:K; "
        "the bytes are the same.",
    )

    @model_validator(mode="after")
    def _sources_agree(self) -> DataConfig:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"sources={names} name one source twice; give each its own name")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError(f"sources={names} have some a weight and some none; give one to each, or to none")
        alone = [
            name
            for name in TextConfig.model_fields
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
        ]
        if names and alone:
            raise ValueError(
                f"{alone[0]}={getattr(self, alone[0])!r} stands beside sources={names}; write it below the source it is of"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> DataConfig:
        for stage in self.curriculum:
            if self.sequence_length % stage.sequence_length:
                raise ValueError(
                    f"curriculum has a stage of sequence_length={stage.sequence_length}, of which sequence_length="
                    f"{self.sequence_length} is no multiple; give a length that divides it"
                )
            if self.stride is not None and self.stride > stage.sequence_length:
                raise ValueError(
                    f"stride={self.stride} is more than a stage's sequence_length={stage.sequence_length}: tokens would be left out"
                )
        ends = [stage.until_fraction or stage.until_step or 0 for stage in self.curriculum]
        if len({stage.until_step is None for stage in self.curriculum}) > 1:
            raise ValueError(
                "curriculum has stages with until_step and stages with until_fraction; give all of them the same"
            )
        if any(after <= before for before, after in pairwise(ends)):
            raise ValueError(f"curriculum has stages that end at {ends}; let each end later than the one before it")
        return self

    @model_validator(mode="after")
    def _window_has_a_stride(self) -> DataConfig:
        if (self.strategy == "window") != (self.stride is not None):
            raise ValueError(
                f"stride={self.stride} and strategy={self.strategy} do not agree: 'window' needs a stride, no other has one"
            )
        if self.stride is not None and self.stride > self.sequence_length:
            raise ValueError(
                f"stride={self.stride} is more than sequence_length={self.sequence_length}: tokens would be left out"
            )
        return self


class VerifyConfig(Section):
    """How much of the dataset is checked before training."""

    level: Literal["quick", "deep"] = Field(
        default="quick",
        title="Level",
        description="'quick' checks manifest, sizes and tokenizer; 'deep' also reads every token and decodes samples.",
    )
    full_below: ByteSize = Field(
        default=ByteSize(20_000_000_000),
        title="Full checksums below",
        description="A dataset up to this size has every checksum checked before training; a larger one at each shard's first read.",
        ge=0,
    )
