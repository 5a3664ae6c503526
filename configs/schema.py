"""Every section and key of a run. Titles, descriptions and limits here are what the documentation and Prefect's form show."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, defaults are checked like given values."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


class TokenizerConfig(Section):
    """The tokenizer: trained on the training documents, or given by its file and then never changed by new text."""

    kind: Literal["bpe", "wordpiece", "unigram"] = Field(
        default="bpe", title="Kind", description="What is trained; each works on bytes, so that any text has tokens."
    )
    path: str | None = Field(
        default=None,
        title="Path",
        description="A tokenizer to use as it is: a tokenizer.json (also that of an earlier dataset, so that more text keeps its "
        "tokens), a Hugging Face folder, or a .tiktoken rank file. Size, frequency and kind are then those of the file.",
        min_length=1,
    )
    eos: str | None = Field(
        default=None,
        title="End of text",
        description="The token of a given tokenizer that ends a document; default: what its folder or usual names say.",
        min_length=1,
    )
    pattern: str = Field(
        default=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        title="Pattern",
        description="How a .tiktoken rank file cuts text into words; default: the pattern of cl100k_base.",
        min_length=1,
    )
    special_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        title="Special tokens",
        description="Further tokens of a trained tokenizer that no text yields, with the ids after the end-of-text token's.",
    )
    vocab_size: Annotated[int, Field(ge=257, le=1_000_000)] = Field(
        default=4096,
        title="Vocabulary size",
        description="Tokens to learn, the 256 bytes and the end-of-text token included.",
    )
    min_frequency: Annotated[int, Field(ge=1)] = Field(
        default=2, title="Minimum frequency", description="A pair of tokens must occur this often to be merged."
    )

    @model_validator(mode="after")
    def _tokens_fit(self) -> TokenizerConfig:
        special = self.special_tokens
        if len(set(special)) != len(special) or "<|endoftext|>" in special:
            raise ValueError(
                "special_tokens names a token twice, or <|endoftext|>, which is always there; leave it out"
            )
        if self.vocab_size < 257 + len(special):
            raise ValueError(
                f"vocab_size={self.vocab_size} has no room for 256 bytes, the end-of-text token and {len(special)} special_tokens; "
                "raise it"
            )
        return self


class DataConfig(Section):
    """Which text is read and how it becomes rows of tokens."""

    source: Literal["files", "python-stdlib", "huggingface"] = Field(
        default="files",
        title="Source",
        description="'files' reads the paths of data.files; 'python-stdlib' reads the .py files of the running Python's own "
        "standard library: real text on every machine without a download; 'huggingface' reads data.dataset through `datasets`.",
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
    text_column: str = Field(
        default="text",
        title="Text column",
        description="The column or field that holds the text of a record.",
        min_length=1,
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
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, title="Tokenizer", description="How text becomes tokens."
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
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = Field(
        default="auto",
        title="Chunking device",
        description="Where the row table is computed: auto (a GPU where there is one), cpu, cuda or cuda:K; the bytes are the same.",
    )

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


class ModelConfig(Section):
    """The architecture, in the field names of Hugging Face's LlamaConfig."""

    hidden_size: Annotated[int, Field(ge=1)] = Field(
        default=256, title="Hidden size", description="Width of the residual stream."
    )
    intermediate_size: Annotated[int, Field(ge=1)] = Field(
        default=768, title="Intermediate size", description="Inner width of the SwiGLU feed-forward block."
    )
    num_hidden_layers: Annotated[int, Field(ge=1)] = Field(
        default=4, title="Layers", description="Number of decoder blocks."
    )
    num_attention_heads: Annotated[int, Field(ge=1)] = Field(
        default=4, title="Attention heads", description="Query heads; must divide hidden_size."
    )
    num_key_value_heads: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Key-value heads",
        description="Heads of keys and values (GQA); must divide the attention heads. Default: as many.",
    )
    rope_theta: Annotated[float, Field(gt=0)] = Field(
        default=10_000.0, title="RoPE theta", description="Base of the rotary frequencies."
    )
    rms_norm_eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-5, title="RMSNorm epsilon", description="Added to the mean square."
    )
    initializer_range: Annotated[float, Field(gt=0)] = Field(
        default=0.02, title="Initializer range", description="Standard deviation of the initial weights."
    )
    tie_word_embeddings: bool = Field(
        default=True, title="Tie embeddings", description="Use the input embedding as the output head's weight."
    )
    attention: Literal["softmax", "infini"] = Field(
        default="softmax",
        title="Attention",
        description="'softmax': causal attention over the row; 'infini': attention inside segments plus a compressive memory "
        "(Munkhdalai et al. 2024, arXiv 2404.07143).",
    )
    segment_length: Annotated[int, Field(ge=1)] = Field(
        default=64, title="Segment length", description="Tokens of local attention in one segment (attention: infini)."
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        key_value_heads = self.num_key_value_heads or self.num_attention_heads
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must divide hidden_size={self.hidden_size}; change one of them"
            )
        if (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} over num_attention_heads={self.num_attention_heads} gives an odd head size; "
                "rotary positions need an even one"
            )
        if self.num_attention_heads % key_value_heads:
            raise ValueError(
                f"num_key_value_heads={key_value_heads} must divide num_attention_heads={self.num_attention_heads}; change one of them"
            )
        return self


class TrainingConfig(Section):
    """How the model is trained. Batches: accumulation is derived as global / (micro x processes) and must be whole."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=1234, title="Seed", description="Decides initial weights and the order of samples."
    )
    max_steps: Annotated[int, Field(ge=1)] = Field(
        default=1000, title="Steps", description="Optimizer steps of the whole run."
    )
    global_batch_size: Annotated[int, Field(ge=1)] = Field(
        default=32, title="Global batch", description="Sequences of one optimizer step, over all processes."
    )
    micro_batch_size: Annotated[int, Field(ge=1)] = Field(
        default=8, title="Micro-batch", description="Sequences of one forward pass of one process."
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=1e-3, title="Learning rate", description="Peak rate, after the warm-up."
    )
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, title="Final rate", description="The cosine ends at this share of the peak rate."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=100,
        title="Warm-up steps",
        description="Steps of linear warm-up from zero; must be fewer than max_steps.",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1,
        title="Weight decay",
        description="AdamW's decay of matrices; norms, embeddings and gates have none.",
    )
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9, title="Adam beta 1", description="Decay of the first moment."
    )
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.95, title="Adam beta 2", description="Decay of the second moment."
    )
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(
        default=1e-8, title="Adam epsilon", description="Added to the denominator."
    )
    gate_learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=0.01,
        title="Gate learning rate",
        description="Peak rate of Infini-attention's gates, an optimizer group of their own without weight decay; same schedule.",
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, title="Clip norm", description="Gradients are scaled down to this norm."
    )
    eval_every: Annotated[int, Field(ge=1)] = Field(
        default=100, title="Evaluate every", description="Steps between validation losses."
    )
    eval_sequences: Annotated[int, Field(ge=1)] = Field(
        default=64,
        title="Evaluation sequences",
        description="Validation rows per evaluation, the same ones each time; fewer if there are fewer.",
    )
    save_every: Annotated[int, Field(ge=1)] = Field(
        default=200, title="Save every", description="Steps between checkpoints."
    )
    save_total_limit: Annotated[int, Field(ge=2)] = Field(
        default=3,
        title="Checkpoints kept",
        description="Newest checkpoints kept beside the best one; at least 2, so a damaged one has a predecessor.",
    )
    log_every: Annotated[int, Field(ge=1)] = Field(
        default=10,
        title="Log every",
        description="Steps between lines on the console and in TensorBoard; metrics.jsonl has every step.",
    )
    max_skips: Annotated[int, Field(ge=0)] = Field(
        default=10,
        title="Skips borne",
        description="An update that is not finite is left out; more than this many in a window go back to the last good checkpoint.",
    )
    skip_window: Annotated[int, Field(ge=1)] = Field(
        default=100, title="Skip window", description="Steps over which left-out updates are counted."
    )
    sample_prompt: str = Field(
        default="def ",
        title="Sample prompt",
        description="Text that the finished model continues, as a first look at it.",
        min_length=1,
    )
    sample_tokens: Annotated[int, Field(ge=1)] = Field(
        default=128, title="Sample length", description="Tokens of that sample."
    )

    @model_validator(mode="after")
    def _warmup_ends(self) -> TrainingConfig:
        if self.warmup_steps >= self.max_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be fewer than max_steps={self.max_steps}")
        return self


class EnvironmentConfig(Section):
    """What the workers run on. 'auto' is decided by patch-environment and pinned by the run; anything else is taken or refused."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", title="Device", description="auto: GPUs where they work, else the CPU."
    )
    nproc_per_node: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        title="Processes",
        description="torchrun workers on this machine; auto: one a GPU, or one on a CPU.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        title="Precision",
        description="fp32, or bf16 autocast over fp32 weights; auto: bf16 on GPUs that have it, else fp32.",
    )
    attention_backend: Literal["auto", "sdpa"] = Field(
        default="auto", title="Attention backend", description="The function that computes softmax attention."
    )
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        title="Threads",
        description="CPU threads of each worker; auto: the usable cores over the processes.",
    )
    distributed_backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", title="Communication backend", description="auto: nccl on GPUs, gloo on CPUs."
    )
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default_factory=dict,
        title="Environment variables",
        description="Set for the workers only, over those of the plan.",
    )


class RuntimeConfig(Section):
    """The run's name and what happens around it."""

    name: Annotated[str, Field(pattern=RUN_NAME)] = Field(
        default="run", title="Run name", description="Folder under runs/; the same name carries on the same run."
    )
    home: Path = Field(
        default_factory=lambda: Path(os.environ.get("INFINI_LLAMA_HOME", "workspace")),
        title="Home",
        description="Folder of datasets and runs; default $INFINI_LLAMA_HOME, else ./workspace.",
    )
    resume: str = Field(
        default="auto",
        title="Resume",
        description="auto: newest good checkpoint, else start; must: refuse to start anew; never: refuse a folder with checkpoints; "
        "best: the best checkpoint; or the path of a checkpoint.",
        min_length=1,
    )
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        default=3,
        title="Retries",
        description="Restarts of failed training without progress; the budget is renewed by every new checkpoint.",
    )
    retry_delay: Annotated[float, Field(ge=0)] = Field(
        default=5.0, title="Retry delay", description="Seconds before the first retry; doubled for each further one."
    )
    max_rollbacks: Annotated[int, Field(ge=0, le=100)] = Field(
        default=2,
        title="Rollbacks",
        description="How often a run that diverges goes back to the last good checkpoint and leaves out the samples since.",
    )
    hang_after: Annotated[float, Field(gt=0)] = Field(
        default=20.0,
        title="Hang after",
        description="Seconds that a worker may be silent beyond twice the longest time its step, evaluation or save has taken.",
    )
    grace_period: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=25.0,
        title="Grace period",
        description="Seconds that workers have to save a checkpoint when the run is asked to stop.",
    )


class PipelineConfig(Section):
    """One run: data, model, training, the machine, and the run itself."""

    data: DataConfig = Field(
        default_factory=DataConfig, title="Data", description="Which text is read and how it becomes rows of tokens."
    )
    verify: VerifyConfig = Field(
        default_factory=VerifyConfig, title="Verify", description="How much is checked before training."
    )
    model: ModelConfig = Field(default_factory=ModelConfig, title="Model", description="The architecture.")
    train: TrainingConfig = Field(
        default_factory=TrainingConfig, title="Training", description="How the model is trained."
    )
    environment: EnvironmentConfig = Field(
        default_factory=EnvironmentConfig, title="Environment", description="What the workers run on."
    )
    runtime: RuntimeConfig = Field(
        default_factory=RuntimeConfig, title="Run", description="The run's name and what happens around it."
    )

    @model_validator(mode="after")
    def _sections_agree(self) -> PipelineConfig:
        problems = []
        if self.data.source == "files" and not self.data.files:
            problems.append("data.files is empty; name text files or globs, or set data.source=python-stdlib")
        if self.data.source == "huggingface" and not self.data.dataset:
            problems.append("data.dataset is empty; name a Hugging Face dataset or the folder of one")
        if self.model.attention == "infini" and self.data.sequence_length <= self.model.segment_length:
            problems.append(
                f"data.sequence_length={self.data.sequence_length} must be more than model.segment_length="
                f"{self.model.segment_length}: with one segment nothing is ever read from Infini-attention's memory"
            )
        processes = self.environment.nproc_per_node
        batch = self.train.micro_batch_size * (processes if isinstance(processes, int) else 1)
        if self.train.global_batch_size % batch:
            problems.append(
                f"train.global_batch_size={self.train.global_batch_size} is not a multiple of train.micro_batch_size="
                f"{self.train.micro_batch_size} x environment.nproc_per_node={processes}; change one of them"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self
