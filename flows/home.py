"""The folder of datasets and runs, as it is named."""

from pathlib import Path

from infini_llama.configs.errors import ConfigError


def usable_home(home: Path, name: str) -> Path:
    """The absolute path of `home`, which need not exist.

    Raises:
        ConfigError: it is a file, or lies below one; `name` says where it was set.
    """
    path = home.resolve()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir():
        raise ConfigError(f"{name}={home}: {existing} is a file; name a folder.")
    return path
