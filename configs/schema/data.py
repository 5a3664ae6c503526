"""Which text is read, how it becomes tokens and rows, and how much of that is checked."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import ByteSize, Field, model_validator

from infini_llama.configs.schema.section import Resume, Section, on_resume
from infini_llama.configs.schema.tokenizer import TokenizerConfig

SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class PasskeyConfig(Section):
    """Texts generated for `data.source: passkey`: a number hidden in repetitive filler text, and a question for it at the
    end.
    """

    documents: Annotated[int, Field(ge=1, le=100_000_000)] = Field(
        default=20_000,
        title="Documents",
        description="Number of texts to generate.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    repetitions: Annotated[int, Field(ge=1)] = Field(
        default=3,
        title="Repetitions",
        description="Maximum repetitions of the filler text. The number is drawn for each text, from 1 to this value.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    seed: Annotated[int, Field(ge=0)] = Field(
        default=0,
        title="Seed",
        description="Seed of the numbers, lengths and positions.",
        json_schema_extra=on_resume(Resume.FIXED),
    )


class TextConfig(Section):
    """Where the text of one source is, and how to read it."""

    source: Literal["files", "python-stdlib", "huggingface", "passkey"] = Field(
        default="files",
        title="Source",
        description="files: the paths in data.files. python-stdlib: the .py files of the running Python's standard library, "
        "without a download. huggingface: data.dataset, through the datasets library. passkey: texts generated as "
        "data.passkey describes.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    files: list[str] = Field(
        default_factory=list,
        title="Files",
        description="Paths, folders or globs (** for any depth), relative to the working directory, or URLs of the same "
        "(s3://, gs://, hf://, https://). A txt, md, rst or py file is one document; json, jsonl, csv, parquet and arrow files "
        "have one document per record; a tar file has the documents of its files. All can be compressed with gz, xz, zst or bz2.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    validation_files: list[str] = Field(
        default_factory=list,
        title="Validation files",
        description="Held-out text, in the same formats as data.files, instead of data.validation_fraction. Training "
        "documents that are also in these files are skipped.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    dataset: str = Field(
        default="",
        title="Dataset",
        description="Name of a dataset on the Hugging Face Hub, a local dataset folder, or a folder written by "
        "save_to_disk (source: huggingface).",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    dataset_config: str | None = Field(
        default=None,
        title="Dataset configuration",
        description="Configuration of the dataset, if it has several.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    revision: str | None = Field(
        default=None,
        title="Dataset revision",
        description="Branch, tag or commit of data.dataset on the Hugging Face Hub. Default: its main branch. The manifest records "
        "the commit that was read.",
        min_length=1,
        json_schema_extra=on_resume(Resume.FIXED),
    )
    dataset_split: str = Field(
        default="train",
        title="Dataset split",
        description="Split of data.dataset to train on.",
        min_length=1,
        json_schema_extra=on_resume(Resume.FIXED),
    )
    validation_split: str | None = Field(
        default=None,
        title="Validation split",
        description="Split of data.dataset to hold out. Default: data.validation_fraction of data.dataset_split.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    streaming: bool = Field(
        default=False,
        title="Streaming",
        description="Read data.dataset without a local copy. The result is the same. For a Hub dataset, the contents of a commit "
        "are cached. Any other dataset is read again by every `run`, including a resume, to check for changes; "
        "`train --dataset` does not.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    passkey: PasskeyConfig = Field(
        default_factory=PasskeyConfig, title="Passkey", description="Texts to generate (source: passkey)."
    )
    text_column: str = Field(
        default="text",
        title="Text column",
        description="Column or field that contains the text of a record.",
        min_length=1,
        json_schema_extra=on_resume(Resume.FIXED),
    )
    format: Literal["auto", "txt", "json", "jsonl", "csv", "parquet", "arrow"] = Field(
        default="auto",
        title="Format",
        description="Format of the files. auto: by file extension. The compression is always detected by the extension. For a tar "
        "file, it selects the files in it.",
        json_schema_extra=on_resume(Resume.FIXED),
    )


class SourceConfig(TextConfig):
    """One of several sources that are mixed."""

    name: Annotated[str, Field(pattern=SOURCE_NAME)] = Field(
        title="Name",
        description="Name of the source in the dataset, in reports and in metrics.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    weight: Annotated[float, Field(gt=0, le=1_000_000)] | None = Field(
        default=None,
        title="Weight",
        description="Share of the training sequences: weight / sum of weights. If no source has a weight, every "
        "sequence is used once per epoch.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    licence: str = Field(
        default="not stated",
        title="Licence",
        description="Licence of the text, recorded in the manifest.",
        min_length=1,
        json_schema_extra=on_resume(Resume.FREE),
    )


class CurriculumStage(Section):
    """Shorter sequences at the beginning of a run."""

    sequence_length: Annotated[int, Field(ge=2, le=1_048_576)] = Field(
        title="Sequence length",
        description="Tokens per sequence during this stage. data.sequence_length must be a multiple of it. Every "
        "step has the same number of tokens.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    until_step: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Until step",
        description="Last step of this stage.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    until_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        title="Until fraction",
        description="Last step of this stage, as a fraction of the steps of the run. It is fixed at the start; a "
        "later change of train.max_steps does not move it.",
        json_schema_extra=on_resume(Resume.FIXED),
    )

    @model_validator(mode="after")
    def _ends_once(self) -> CurriculumStage:
        if (self.until_step is None) == (self.until_fraction is None):
            raise ValueError(
                f"until_step={self.until_step} and until_fraction={self.until_fraction}: set exactly one of them"
            )
        return self


class DataConfig(TextConfig):
    """Which text is read and how it becomes sequences of tokens."""

    sources: list[SourceConfig] = Field(
        default_factory=list,
        title="Sources",
        description="Several sources instead of one, each with a name and its own files, dataset, format or "
        "text_column. No sequence contains text from two sources.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    min_length: Annotated[int, Field(ge=0)] = Field(
        default=0,
        title="Minimum length",
        description="Documents with fewer characters are skipped and counted.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    deduplicate: bool = Field(
        default=False,
        title="Deduplicate",
        description="Keep only the first of several documents with exactly the same text. Duplicates are counted in either case.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    on_bad_input: Literal["fail", "skip"] = Field(
        default="fail",
        title="Bad input",
        description="fail: a damaged file or record ends the build with an error that names it. skip: it is skipped, "
        "listed and counted.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.05,
        title="Validation fraction",
        description="Fraction of documents to hold out, chosen by a hash of their content.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    sequence_length: Annotated[int, Field(ge=2, le=1_048_576)] = Field(
        default=256,
        title="Sequence length",
        description="Tokens per training sequence (context length, block size).",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    strategy: Literal["concat", "window", "greedy", "first_fit", "best_fit", "padded"] = Field(
        default="concat",
        title="Sequence strategy",
        description="concat: documents joined by the end-of-text token and cut. window: the same, overlapping by data.stride. "
        "greedy, first_fit, best_fit: packed sequences of whole documents; the rest is padding (best_fit needs the "
        "least). padded: one document per sequence.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    loss_on: Literal["all", "answer"] = Field(
        default="all",
        title="Loss on",
        description="Labels that count in the loss. all: every token of a document. answer: only what follows the last "
        "data.answer_after of each document.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    answer_after: str = Field(
        default="",
        title="Answer after",
        description="Text that ends the prompt of a document (loss_on: answer), for example ' The pass key is'. What follows its "
        "last occurrence is the answer. Prompt and answer are tokenized separately. Every document must contain it.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    stride: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Stride",
        description="Tokens from the start of one sequence to the start of the next (strategy: window); at most sequence_length.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    curriculum: list[CurriculumStage] = Field(
        default_factory=list,
        title="Curriculum",
        description="Stages of shorter sequences before data.sequence_length. Each stage reads the text from the beginning, in "
        "its own order.",
        json_schema_extra=on_resume(Resume.FIXED),
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, title="Tokenizer", description="How text becomes tokens."
    )
    tokenizer_engine: Literal["auto", "tokenizers", "gigatoken"] = Field(
        default="auto",
        title="Tokenizer engine",
        description="Library that encodes the text. auto: gigatoken (the extra `fast`) if it is installed and gives "
        "the same tokens as `tokenizers`. The dataset is the same with either.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    shard_size: ByteSize = Field(
        default=ByteSize(256 * 1024**2),
        title="Shard size",
        description="Maximum size of one token shard, for example 256MiB.",
        ge=1024,
        json_schema_extra=on_resume(Resume.FIXED),
    )
    num_workers: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1,
        title="Preprocessing workers",
        description="Number of processes that tokenize. The dataset does not depend on it.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    engine: Literal["local", "dask", "ray"] = Field(
        default="local",
        title="Preprocessing engine",
        description="local: processes on this machine. dask, ray: workers of a cluster (extras of the same names) "
        "that can access runtime.home and the text. The dataset does not depend on it.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    engine_address: str | None = Field(
        default=None,
        title="Cluster address",
        description="Address of the Dask scheduler (tcp://host:8786) or the Ray cluster (host:6379). Default: a "
        "temporary cluster of data.num_workers workers on this machine.",
        min_length=1,
        json_schema_extra=on_resume(Resume.FREE),
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = Field(
        default="auto",
        title="Row table device",
        description="Device that computes the row table: cpu, cuda or cuda:K. auto: the CPU, which is faster at every size. The dataset "
        "does not depend on it.",
        json_schema_extra=on_resume(Resume.FREE),
    )

    residency: Literal["auto", "device", "host"] = Field(
        default="auto",
        title="Residency",
        description="Where training tokens are kept. device: in the memory of each worker's device, where batches are built. host: in "
        "mapped files; train.dataloader_num_workers prepares batches ahead. auto: on GPUs, device if the tokens take at most "
        "a tenth of the memory; otherwise host. The batches are the same with each.",
        json_schema_extra=on_resume(Resume.FREE),
    )

    @model_validator(mode="after")
    def _sources_agree(self) -> DataConfig:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"sources={names} contains a duplicate name; give each source its own name")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError(f"sources={names}: only some have a weight; give a weight to all sources or to none")
        single = [
            name
            for name in TextConfig.model_fields
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
        ]
        if names and single:
            raise ValueError(
                f"{single[0]}={getattr(self, single[0])!r} is set beside sources={names}; write it below its source"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> DataConfig:
        for stage in self.curriculum:
            if self.sequence_length % stage.sequence_length:
                raise ValueError(
                    f"curriculum has a stage of sequence_length={stage.sequence_length}, which does not divide sequence_length="
                    f"{self.sequence_length}; choose a divisor"
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
            raise ValueError(
                f"curriculum has stages that end at {ends}; each stage must end later than the one before it"
            )
        return self

    @model_validator(mode="after")
    def _answers_have_a_beginning(self) -> DataConfig:
        if (self.loss_on == "answer") != bool(self.answer_after):
            raise ValueError(
                f"loss_on={self.loss_on} and answer_after={self.answer_after!r} do not agree: 'answer' needs the text that ends "
                "the prompt, 'all' has none"
            )
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
        description="quick: manifest, sizes and tokenizer. deep: also every token, and decoded samples.",
        json_schema_extra=on_resume(Resume.FREE),
    )
    full_below: ByteSize = Field(
        default=ByteSize(20_000_000_000),
        title="Full checksums below",
        description="Up to this size, all checksums of a dataset are checked before training. For a larger dataset, "
        "each shard is checked when it is first read.",
        ge=0,
        json_schema_extra=on_resume(Resume.FREE),
    )
