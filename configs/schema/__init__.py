"""Every section and key of a run. Titles, descriptions and limits here are what the documentation and Prefect's form show."""

from configs.schema.data import DataConfig, PasskeyConfig, VerifyConfig
from configs.schema.deployment import DeploymentConfig, ScheduleConfig
from configs.schema.environment import EnvironmentConfig
from configs.schema.evaluation import EvaluationConfig
from configs.schema.launchers import KubernetesConfig, NodeConfig, SlurmConfig
from configs.schema.model import ModelConfig, RopeScaling
from configs.schema.pipeline import PipelineConfig
from configs.schema.runtime import RUN_NAME, RuntimeConfig
from configs.schema.section import Section
from configs.schema.storage import StorageConfig
from configs.schema.tokenizer import TokenizerConfig
from configs.schema.training import TrainingConfig

__all__ = [
    "RUN_NAME",
    "DataConfig",
    "DeploymentConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "KubernetesConfig",
    "ModelConfig",
    "NodeConfig",
    "PasskeyConfig",
    "PipelineConfig",
    "RopeScaling",
    "RuntimeConfig",
    "ScheduleConfig",
    "Section",
    "SlurmConfig",
    "StorageConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "VerifyConfig",
]
