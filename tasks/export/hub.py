"""A model of the Hugging Face Hub by its name, as a folder of the local cache."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from infini_llama.configs.errors import ConfigError

NAME = r"[A-Za-z0-9][\w.-]*/[\w.-]+"  # OWNER/NAME
# Weights, configuration and tokenizer; never code or pickles.
FILES = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json"]


def folder_of(model: str, revision: str | None) -> Path:
    """A folder as it is, or a model of the Hub, downloaded once; a token is taken from HF_TOKEN or `hf auth login`.

    Raises:
        ConfigError: the Hub has no such model or revision, does not give it to this account, or cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.exists() or not re.fullmatch(NAME, model):
        if revision is not None:
            raise ConfigError(f"--revision {revision} is for a model of the Hub, but {model} is a folder; remove it.")
        return folder
    about = f"{model}@{revision}" if revision else model
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=FILES))
    except GatedRepoError:
        raise ConfigError(
            f"{about} is gated: accept its terms on its page of the Hub, then run `hf auth login` or set HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"{model} has no revision {revision}; name a branch, tag or commit of it.") from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"{model} is neither a folder here nor a model of the Hub that this account sees; correct the name, or set HF_TOKEN."
        ) from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{about} cannot be downloaded and is not complete in the local cache ({why}); check the network and HF_HUB_OFFLINE, "
            "or name a folder."
        ) from None
