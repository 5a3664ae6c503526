"""Paths that the commands share."""

import logging
from argparse import Namespace
from pathlib import Path

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import JsonObject
from infini_llama.flows.home import usable_home

Answer = tuple[JsonObject, str]  # a record for --json, and text


def home_folder() -> Path:
    from infini_llama.configs.schema.runtime import default_home

    return usable_home(default_home(), "INFINI_LLAMA_HOME")


def find(name: str, *kinds: str) -> Path:
    """A path, or a name in one of these folders of the home folder."""
    candidates = [Path(name), *(home_folder() / kind / name for kind in kinds)]
    for path in candidates:
        if path.is_dir():
            return path.resolve()
    raise ConfigError(
        f"'{name}' is neither a folder nor the name of one in {' or '.join(str(path.parent) for path in candidates[1:])}."
    )


def prefect_speaks_into(home: Path, arguments: Namespace) -> None:
    """Send Prefect's log to a file: it leaves the root logger alone if that has a handler."""
    if arguments.verbose:
        return
    path = home / "prefect" / "client.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
