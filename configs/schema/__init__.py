"""Every section and key of a run.

Titles, descriptions and limits here are what the documentation and Prefect's form show.
"""

from infini_llama.configs.schema.data import DataConfig, VerifyConfig
from infini_llama.configs.schema.deployment import DeploymentConfig, ScheduleConfig
from infini_llama.configs.schema.environment import EnvironmentConfig
from infini_llama.configs.schema.evaluation import EvaluationConfig
from infini_llama.configs.schema.model import ModelConfig
from infini_llama.configs.schema.pipeline import PipelineConfig
from infini_llama.configs.schema.runtime import RUN_NAME, RuntimeConfig, StorageConfig
from infini_llama.configs.schema.sources import PasskeyConfig
from infini_llama.configs.schema.tokenizer import TokenizerConfig
from infini_llama.configs.schema.training import TrainingConfig

__all__ = [
    "RUN_NAME",
    "DataConfig",
    "DeploymentConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "ModelConfig",
    "PasskeyConfig",
    "PipelineConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "StorageConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "VerifyConfig",
]
