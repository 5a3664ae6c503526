"""Keys and passwords that a user puts into environment variables stay out of every file."""

import re
from typing import TYPE_CHECKING

from infini_llama.configs.errors import ConfigError

if TYPE_CHECKING:
    from infini_llama.configs.schema import PipelineConfig

SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASS[A-Z]*|CREDENTIALS?)(_|$)", re.IGNORECASE)


def masked(variables: dict[str, str]) -> dict[str, str]:
    """The variables, with *** for the value of each whose name speaks of a secret."""
    return {name: "***" if SECRET.search(name) else value for name, value in variables.items()}


def without_secrets(config: dict) -> dict:
    """The configuration as it may be written down: `environment.env` masked."""
    environment = config["environment"]
    return config | {"environment": environment | {"env": masked(environment["env"])}}


def apart(config: "PipelineConfig") -> tuple["PipelineConfig", dict[str, str]]:
    """The configuration without the secrets of `environment.env`, and these: Prefect writes down what a flow is called with."""
    env = config.environment.env
    secrets = {name: value for name, value in env.items() if SECRET.search(name)}
    rest = {name: value for name, value in env.items() if name not in secrets}
    environment = config.environment.model_copy(update={"env": rest})
    return config.model_copy(update={"environment": environment}), secrets


def refuse_secrets(config: "PipelineConfig") -> None:
    """For what is handed to Prefect's server, where another process takes it up.

    Raises:
        ConfigError: there are secrets in `environment.env`.
    """
    if secrets := apart(config)[1]:
        names = ", ".join(f"environment.env.{name}" for name in secrets)
        raise ConfigError(
            f"{names}: that is secret, and Prefect's server would write it down with the run's parameters; set it in the environment of "
            "the process that works off its runs ('infini-llama serve', a worker, or a Secret of the cluster)."
        )
