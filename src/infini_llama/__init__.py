"""Raw text to a trained Llama or Infini-Llama.

Example:
    from infini_llama import DataConfig, PipelineConfig, run

    summary = run(PipelineConfig(data=DataConfig(files=["texts/**/*.txt"])))

Names are imported when they are first used, so that `import infini_llama` loads neither torch nor
pydantic.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infini_llama.configs.errors import ExitCode as ExitCode
    from infini_llama.configs.errors import PipelineError as PipelineError
    from infini_llama.configs.loading import load_config as load_config
    from infini_llama.configs.schema import DataConfig as DataConfig
    from infini_llama.configs.schema import EnvironmentConfig as EnvironmentConfig
    from infini_llama.configs.schema import EvaluationConfig as EvaluationConfig
    from infini_llama.configs.schema import ModelConfig as ModelConfig
    from infini_llama.configs.schema import PipelineConfig as PipelineConfig
    from infini_llama.configs.schema import RuntimeConfig as RuntimeConfig
    from infini_llama.configs.schema import StorageConfig as StorageConfig
    from infini_llama.configs.schema import TokenizerConfig as TokenizerConfig
    from infini_llama.configs.schema import TrainingConfig as TrainingConfig
    from infini_llama.configs.schema import VerifyConfig as VerifyConfig
    from infini_llama.flows.pipeline import run as run
    from infini_llama.flows.pretrain import pretrain as pretrain
    from infini_llama.tasks.runs.generation import generate as generate
    from infini_llama.tasks.runs.load import TrainedRun as TrainedRun
    from infini_llama.tasks.runs.load import load_run as load_run

for _name in ("configs", "flows", "model", "tasks"):
    _folder = Path(__file__).with_name(_name)
    if not _folder.is_dir():
        raise ImportError(
            f"{_folder} is not a link to the folder {_name}/ of the checkout, as in a download "
            "without links; run `pip install .` there and start Python elsewhere, or clone with "
            "git -c core.symlinks=true."
        )

_MODULES = {
    "infini_llama.configs.errors": ("ExitCode", "PipelineError"),
    "infini_llama.configs.loading": ("load_config",),
    "infini_llama.configs.schema": (
        "DataConfig",
        "EnvironmentConfig",
        "EvaluationConfig",
        "ModelConfig",
        "PipelineConfig",
        "RuntimeConfig",
        "StorageConfig",
        "TokenizerConfig",
        "TrainingConfig",
        "VerifyConfig",
    ),
    "infini_llama.flows.pipeline": ("run",),
    "infini_llama.flows.pretrain": ("pretrain",),
    "infini_llama.tasks.runs.generation": ("generate",),
    "infini_llama.tasks.runs.load": ("TrainedRun", "load_run"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'infini_llama' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
