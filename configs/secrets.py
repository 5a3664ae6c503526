"""Values of `environment.env` stay out of every file and of Prefect's database, unless the variable is known to hold no secret."""

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from infini_llama.configs.errors import ConfigError

if TYPE_CHECKING:
    from infini_llama.configs.schema import PipelineConfig

# Variables whose values are written down: paths, the locale, and settings of libraries.
NAMES = re.compile(
    r"""CC|CXX|HOME|LANG|LC_ALL|LD_LIBRARY_PATH|LD_PRELOAD|MAX_JOBS|NO_COLOR|PATH|TERM|TMPDIR|TZ
    |PYTHON(DONTWRITEBYTECODE|FAULTHANDLER|HASHSEED|PATH|UNBUFFERED|WARNINGS)
    |GLIBC_TUNABLES|MALLOC_CONF|NVIDIA_TF32_OVERRIDE|NVIDIA_VISIBLE_DEVICES|TOKENIZERS_PARALLELISM|TRANSFORMERS_OFFLINE
    |HF_(DATASETS_CACHE|DATASETS_OFFLINE|HOME|HUB_CACHE|HUB_OFFLINE)
    |WANDB_(DIR|ENTITY|MODE|PROJECT|SILENT)""",
    re.VERBOSE,
)
FAMILIES = re.compile(
    r"(CUBLAS|CUBLASLT|CUDA|CUDNN|FI|GLOO|GOMP|KMP|MALLOC|MKL|NCCL|OMP|ONEDNN|OPENBLAS|PYTORCH|RAYON|TCMALLOC|TORCH|TORCHDYNAMO"
    r"|TORCHINDUCTOR|TRITON|UCX)_[A-Z0-9_]+"
)
# A variable of such a family may still hold a secret.
SECRET = re.compile(r"AUTH|CRED|DSN|KEY|PASS|PWD|SECRET|TOKEN|UR[IL]")
MASK = "***"


def masked(variables: dict[str, str]) -> dict[str, str]:
    """The variables, with *** for the value of each that is not known to hold no secret."""
    return {name: value if _is_shown(name) else MASK for name, value in variables.items()}


def without_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as it may be written down: `environment.env` masked."""
    environment = config["environment"]
    return config | {"environment": environment | {"env": masked(environment["env"])}}


_withheld: dict[str, str] = {}


@contextlib.contextmanager
def withheld(config: "PipelineConfig") -> Iterator["PipelineConfig"]:
    """Inside, the configuration without its secrets, since Prefect writes down a flow's parameters; `restored` adds them again."""
    shown = {name: value for name, value in config.environment.env.items() if _is_shown(name)}
    _withheld.update(_secrets(config))
    try:
        yield _with_variables(config, shown)
    finally:
        _withheld.clear()


def restored(config: "PipelineConfig") -> "PipelineConfig":
    """The configuration of a flow run with what `withheld` left out of its parameters."""
    return _with_variables(config, config.environment.env | _withheld)


def _with_variables(config: "PipelineConfig", env: dict[str, str]) -> "PipelineConfig":
    return config.model_copy(update={"environment": config.environment.model_copy(update={"env": env})})


def refuse_secrets(config: "PipelineConfig") -> None:
    """For what is handed to Prefect's server, where another process takes it up.

    Raises:
        ConfigError: there are secrets in `environment.env`.
    """
    if secrets := _secrets(config):
        names = ", ".join(f"environment.env.{name}" for name in secrets)
        raise ConfigError(
            f"{names}: the value may be a secret, and Prefect's server stores the parameters of a run; set the variable in the environment "
            "of the process that executes its runs ('infini-llama serve', a worker, or a Secret of the cluster)."
        )


def _secrets(config: "PipelineConfig") -> dict[str, str]:
    return {name: value for name, value in config.environment.env.items() if not _is_shown(name)}


def _is_shown(name: str) -> bool:
    return bool(NAMES.fullmatch(name) or (FAMILIES.fullmatch(name) and not SECRET.search(name)))
