"""Keeps values of `environment.env` out of every file and of Prefect's database.

Exempt is a variable that is known to hold no secret.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import JsonValue

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import changed, dotted

if TYPE_CHECKING:
    from infini_llama.configs.schema import PipelineConfig

# Variables whose values are written down: paths, the locale, and settings of libraries.
NAMES = re.compile(
    r"""CC|CXX|HOME|LANG|LC_ALL|LD_LIBRARY_PATH|LD_PRELOAD|MAX_JOBS|NO_COLOR|PATH|TERM|TMPDIR|TZ
    |PYTHON(DONTWRITEBYTECODE|FAULTHANDLER|HASHSEED|PATH|UNBUFFERED|WARNINGS)
    |GLIBC_TUNABLES|MALLOC_CONF|NVIDIA_TF32_OVERRIDE|NVIDIA_VISIBLE_DEVICES|"""
    r"""TOKENIZERS_PARALLELISM|TRANSFORMERS_OFFLINE
    |HF_(DATASETS_CACHE|DATASETS_OFFLINE|HOME|HUB_CACHE|HUB_OFFLINE)
    |WANDB_(DIR|ENTITY|MODE|PROJECT|SILENT)""",
    re.VERBOSE,
)
FAMILIES = re.compile(
    r"(CUBLAS|CUBLASLT|CUDA|CUDNN|FI|GLOO|GOMP|KMP|MALLOC|MKL|NCCL|OMP|ONEDNN|OPENBLAS|PYTORCH"
    r"|RAYON|TCMALLOC|TORCH|TORCHDYNAMO|TORCHINDUCTOR|TRITON|UCX)_[A-Z0-9_]+"
)
# A variable of such a family may still hold a secret.
SECRET = re.compile(r"AUTH|CRED|DSN|KEY|PASS|PWD|SECRET|TOKEN|UR[IL]")
MASK = "***"
PASSWORD = re.compile(r"://[^/:@\s]*:[^/@\s]+@")  # in a URL
# Prefect's own way to name a Secret block; a flow replaces it by the block's value where the run is
# executed.
REFERENCE = re.compile(r"\{\{\s*prefect\.blocks\.secret\.([a-z0-9-]+)\s*\}\}")


def masked(variables: dict[str, str]) -> dict[str, str]:
    """The variables, with *** for the value of each that is not known to hold no secret."""
    return variables | dict.fromkeys(_secrets(variables), MASK)


def without_secrets(config: "PipelineConfig") -> "PipelineConfig":
    """The configuration as it may be written down: `environment.env` masked."""
    return _with_variables(config, masked(config.environment.env))


def stored_settings(settings: JsonValue) -> JsonValue:
    """Settings of a configuration as Prefect's server may store them.

    Variables that may hold a secret are left out, so that a retry in another process has those of
    that process. The settings are not checked yet, and may be of any kind.
    """
    if not isinstance(settings, dict):
        return settings
    environment = settings.get("environment")
    if not isinstance(environment, dict):
        return settings
    variables = environment.get("env")
    if not isinstance(variables, dict):
        return settings
    shown: dict[str, JsonValue] = {}
    for name, value in variables.items():
        if _is_shown(name) or _is_reference(str(value)):
            shown[name] = value
    stored = dict(settings)
    stored["environment"] = {**environment, "env": shown}
    return stored


def with_blocks(
    config: "PipelineConfig", read: Callable[[str], str]
) -> "PipelineConfig":
    """The configuration with the values of the Secret blocks that `environment.env` names.

    Args:
        read: value of a block by its name.

    Raises:
        ConfigError: the variable is one whose value is written down.
    """
    blocks: dict[str, str] = {}
    for name, value in config.environment.env.items():
        reference = REFERENCE.fullmatch(value)
        if reference:
            blocks[name] = reference[1]
    for name in filter(_is_shown, blocks):
        raise ConfigError(
            f"environment.env.{name} names a Secret block, but the run's files show this variable; "
            "write its value."
        )
    values = {name: read(block) for name, block in blocks.items()}
    return _with_variables(config, config.environment.env | values)


def refuse_blocks(config: "PipelineConfig") -> None:
    """Refuse Secret blocks in a run without Prefect, which cannot read them.

    Raises:
        ConfigError: `environment.env` names a Secret block.
    """
    for name, value in config.environment.env.items():
        if _is_reference(value):
            raise ConfigError(
                f"environment.env.{name}={value} is a Prefect block; run without --no-prefect, or "
                "set its value."
            )


def _is_reference(value: str) -> bool:
    return REFERENCE.fullmatch(value) is not None


def _with_variables(config: "PipelineConfig", env: dict[str, str]) -> "PipelineConfig":
    return changed(config, environment=changed(config.environment, env=env))


def refuse_passwords(config: "PipelineConfig") -> None:
    """Refuse passwords in URLs, which Prefect's server would store.

    Raises:
        ConfigError: there is one.
    """
    for key, value in dotted(
        config.model_dump(mode="json", include={"data", "storage"})
    ).items():
        if PASSWORD.search(str(value)):
            raise ConfigError(
                f"{key}: a URL contains a password, and Prefect's server stores the parameters of "
                "a run; leave it out, and set it in the environment of the process that executes "
                "its runs, for ftp:// as FSSPEC_FTP_PASSWORD."
            )


def refuse_secrets(config: "PipelineConfig") -> None:
    """Refuse secrets in what is handed to Prefect's server, where another process takes it up.

    Raises:
        ConfigError: there are secrets in `environment.env`, or a password in a URL.
    """
    refuse_passwords(config)
    secrets = _secrets(config.environment.env)
    if secrets:
        names = ", ".join(f"environment.env.{name}" for name in secrets)
        raise ConfigError(
            f"{names}: the value may be a secret, and Prefect's server stores the parameters of a "
            "run; set the variable in the environment of the process that executes its runs "
            "('infini-llama serve', a worker, or a Secret of the cluster), or name a Prefect "
            "Secret block: '{{ prefect.blocks.secret.NAME }}'."
        )


def _secrets(variables: dict[str, str]) -> dict[str, str]:
    """The variables that are not known to hold no secret, without references to Secret blocks."""
    return {
        name: value
        for name, value in variables.items()
        if not _is_shown(name) and not _is_reference(value)
    }


def _is_shown(name: str) -> bool:
    """Whether the variable is known to hold no secret."""
    return bool(
        NAMES.fullmatch(name) or (FAMILIES.fullmatch(name) and not SECRET.search(name))
    )
