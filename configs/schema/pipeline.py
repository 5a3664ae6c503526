"""One run, and what its sections must agree on."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_validator

from configs.schema.data import DataConfig, VerifyConfig
from configs.schema.deployment import DeploymentConfig
from configs.schema.environment import EnvironmentConfig
from configs.schema.evaluation import EvaluationConfig
from configs.schema.model import ModelConfig
from configs.schema.runtime import RuntimeConfig
from configs.schema.section import Section
from configs.schema.storage import StorageConfig
from configs.schema.training import TrainingConfig


def _of_a_run(schema: dict[str, Any]) -> None:
    """Leaves out of Prefect's form what is read before there is a run."""
    del schema["properties"]["deployment"]


class PipelineConfig(Section):
    """One run: data, model, training, the machine, and the run itself."""

    model_config = ConfigDict(json_schema_extra=_of_a_run)

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
    evaluate: EvaluationConfig = Field(
        default_factory=EvaluationConfig, title="Evaluation", description="What is measured of the trained model."
    )
    environment: EnvironmentConfig = Field(
        default_factory=EnvironmentConfig, title="Environment", description="What the workers run on."
    )
    runtime: RuntimeConfig = Field(
        default_factory=RuntimeConfig, title="Run", description="The run's name and what happens around it."
    )
    storage: StorageConfig = Field(
        default_factory=StorageConfig, title="Storage", description="Where copies are kept beyond this machine."
    )
    deployment: DeploymentConfig = Field(
        default_factory=DeploymentConfig, title="Deployment", description="How it is offered on a Prefect server."
    )

    @model_validator(mode="after")
    def _sections_agree(self) -> PipelineConfig:
        problems = []
        places = {f"data.sources.{number}": source for number, source in enumerate(self.data.sources)} or {
            "data": self.data
        }
        for key, text in places.items():
            if text.source == "files" and not text.files:
                problems.append(
                    f"{key}.files is empty; name text files or globs, set {key}.source=python-stdlib, or list several in data.sources"
                )
            if text.source == "huggingface" and not text.dataset:
                problems.append(f"{key}.dataset is empty; name a Hugging Face dataset or the folder of one")
        if self.model.attention == "infini" and self.data.sequence_length <= self.model.segment_length:
            problems.append(
                f"data.sequence_length={self.data.sequence_length} must be more than model.segment_length="
                f"{self.model.segment_length}: with one segment nothing is ever read from Infini-attention's memory"
            )
        processes, micro = self.environment.nproc_per_node, self.train.micro_batch_size
        nodes = self.environment.nnodes
        batch = (micro if isinstance(micro, int) else 1) * (processes if isinstance(processes, int) else 1) * nodes
        if self.train.global_batch_size % batch:
            problems.append(
                f"train.global_batch_size={self.train.global_batch_size} is not a multiple of train.micro_batch_size="
                f"{self.train.micro_batch_size} x environment.nproc_per_node={processes}"
                + (f" x environment.nnodes={nodes}" if nodes > 1 else "")
                + "; change one of them"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self
