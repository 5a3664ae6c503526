"""One run, and what its sections must agree on."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_validator

from infini_llama.configs.schema.data import DataConfig, VerifyConfig
from infini_llama.configs.schema.deployment import DeploymentConfig
from infini_llama.configs.schema.environment import EnvironmentConfig
from infini_llama.configs.schema.evaluation import EvaluationConfig
from infini_llama.configs.schema.model import ModelConfig
from infini_llama.configs.schema.runtime import RuntimeConfig, StorageConfig
from infini_llama.configs.schema.section import Section
from infini_llama.configs.schema.training import TrainingConfig


def context_problems(config: PipelineConfig) -> list[str]:
    """Problems of `train.context_parallel`, one sentence per problem."""
    size = config.train.context_parallel
    processes = config.environment.nproc_per_node
    model = config.model
    setting = f"train.context_parallel={size}"
    problems: list[str] = []
    if size == 1:
        return []
    if model.attention == "softmax":
        return [
            f"{setting} splits sequences between segments, and model.attention=softmax has none; "
            "use infini or local, or train.context_parallel=1 with "
            "train.activation_checkpointing=full"
        ]
    if model.attend_previous_segment:
        problems.append(
            f"{setting} splits sequences between segments that see no other, and "
            "model.attend_previous_segment=true lets each see the one before it; change one of them"
        )
    if isinstance(processes, int) and processes % size:
        problems.append(
            f"{setting} does not divide environment.nproc_per_node={processes}; change one of them"
        )
    for rows in (config.data, *config.data.curriculum):
        key = "data." if rows is config.data else "a stage of data.curriculum with "
        key += f"sequence_length={rows.sequence_length}"
        if rows.sequence_length % (size * model.segment_length):
            problems.append(
                f"{setting}: {key} is no multiple of that x "
                f"model.segment_length={model.segment_length}, so that the processes would not "
                "have the same whole number of segments; change one of them"
            )
    return problems


def gate_problems(config: PipelineConfig) -> list[str]:
    """Problems of a list in `train.init_gate`, one sentence per problem."""
    gates = config.train.init_gate
    model = config.model
    # Without a memory the list is not used.
    if not isinstance(gates, list) or model.attention != "infini":
        return []
    if model.memory_layers is None:
        number = model.num_hidden_layers
        key = f"model.num_hidden_layers={model.num_hidden_layers}"
    else:
        number = len(model.memory_layers)
        key = f"model.memory_layers has {len(model.memory_layers)}"
    if len(gates) != number:
        return [
            f"train.init_gate has {len(gates)} values, but {key}; write one entry per layer with a "
            "memory"
        ]
    heads = model.num_attention_heads
    return [
        f"train.init_gate: entry {place} has {len(entry)} values, but "
        f"model.num_attention_heads={heads}; write one value per head"
        for place, entry in enumerate(gates)
        if isinstance(entry, list) and len(entry) != heads
    ]


def _of_a_run(schema: dict[str, Any]) -> None:
    """Leave out of Prefect's form what is read before there is a run."""
    del schema["properties"]["deployment"]


class PipelineConfig(Section):
    """One run: data, model, training, environment and the run itself."""

    model_config = ConfigDict(json_schema_extra=_of_a_run)

    data: DataConfig = Field(default_factory=DataConfig)
    verify: VerifyConfig = Field(default_factory=VerifyConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    train: TrainingConfig = Field(default_factory=TrainingConfig)
    evaluate: EvaluationConfig = Field(default_factory=EvaluationConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    deployment: DeploymentConfig = Field(default_factory=DeploymentConfig)

    def with_vocab_size(self, vocab_size: int) -> PipelineConfig:
        """The configuration with the vocabulary size that the tokenizer turned out to have.

        It may be below the schema's minimum.
        """
        tokenizer = self.data.tokenizer.model_copy(update={"vocab_size": vocab_size})
        data = self.data.model_copy(update={"tokenizer": tokenizer})
        return self.model_copy(update={"data": data})  # not validated: see above

    def _text_problems(self) -> list[str]:
        """Sources without text in `data`, one sentence per problem."""
        problems: list[str] = []
        places = {
            f"data.sources.{number}": source
            for number, source in enumerate(self.data.sources)
        } or {"data": self.data}
        for key, text in places.items():
            if text.source == "files" and not text.files:
                problems.append(
                    f"{key}.files is empty; name text files or globs, set "
                    f"{key}.source=python-stdlib, or list several in data.sources"
                )
            if (
                text.source == "passkey"
                and text.passkey.filler == "files"
                and not text.files
            ):
                problems.append(
                    f"{key}.files is empty; {key}.passkey.filler=files takes the text from there"
                )
            if text.source == "huggingface" and not text.dataset:
                problems.append(
                    f"{key}.dataset is empty; name a Hugging Face dataset or the folder of one"
                )
        return problems

    def _batch_problems(self) -> list[str]:
        """Problems of `train.global_batch_size`, one sentence per problem."""
        processes = self.environment.nproc_per_node
        nodes = self.environment.nnodes
        together = self.train.context_parallel
        workers = together * nodes
        if isinstance(processes, int) and processes % together == 0:
            workers = processes * nodes
        batch = self.train.least_micro_batch * workers // together
        if self.train.global_batch_size % batch == 0:
            return []
        micro = self.train.micro_batch_size
        return [
            f"train.global_batch_size={self.train.global_batch_size} is not a multiple of "
            + (f"train.micro_batch_size={micro} x " if micro is not None else "")
            + f"environment.nproc_per_node={processes}"
            + (f" x environment.nnodes={nodes}" if nodes > 1 else "")
            + ("" if together == 1 else f" / {together} that share each sequence")
            + "; change one of them"
        ]

    @model_validator(mode="after")
    def _sections_agree(self) -> PipelineConfig:
        problems = self._text_problems()
        if (
            self.model.attention == "infini"
            and self.data.sequence_length <= self.model.unread_tokens
        ):
            setting = f"data.sequence_length={self.data.sequence_length}"
            length = self.model.segment_length
            if self.model.attend_previous_segment:
                problems.append(
                    f"{setting} must be more than two segments of model.segment_length={length}: "
                    "with model.attend_previous_segment=true they never read Infini-attention's "
                    "memory"
                )
            else:
                problems.append(
                    f"{setting} must be more than model.segment_length={length}: with one segment "
                    "nothing is ever read from Infini-attention's memory"
                )
        problems += gate_problems(self)
        frozen = self.train.frozen_layers
        if frozen == "all_but_memory" and self.model.attention != "infini":
            problems.append(
                "train.frozen_layers=all_but_memory leaves nothing to train: "
                f"model.attention={self.model.attention} has no memory; use "
                "model.attention=infini, or a number of layers"
            )
        if isinstance(frozen, int) and frozen >= self.model.num_hidden_layers:
            problems.append(
                f"train.frozen_layers={frozen} leaves no layer to train; "
                f"model.num_hidden_layers={self.model.num_hidden_layers}"
            )
        memory_layers = self.model.memory_layers
        if isinstance(frozen, int) and memory_layers and frozen > max(memory_layers):
            problems.append(
                f"train.frozen_layers={frozen} leaves every memory untrained: "
                f"model.memory_layers={memory_layers} are below; give at most {max(memory_layers)}"
            )
        problems += self._batch_problems()
        problems += context_problems(self)
        if problems:
            raise ValueError(*problems)
        return self
