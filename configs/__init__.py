"""What a run is: `from configs import DataConfig, ModelConfig, TrainingConfig, EnvironmentConfig, PipelineConfig`."""

from typing import Any


def __getattr__(name: str) -> Any:  # keeps `import configs` free of pydantic until a class is asked for
    if name.startswith("_"):
        raise AttributeError(name)
    from configs import schema

    return getattr(schema, name)
