"""Rendezvous variables, where the environment does not set them."""

import os
import socket

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.patch_environment.patches.patch import Patch

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
MEETING = ("MASTER_ADDR", "MASTER_PORT")


def apply() -> None:
    """Makes a worker that was started by hand the only one of its run; what torchrun set stays.

    Raises:
        ConfigError: only some are set, for a world size above 1, so the other workers cannot be found.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *MEETING) if name not in os.environ]
    if missing and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} but {', '.join(missing)} not set: start several workers by torchrun, "
            "or unset WORLD_SIZE for a single one."
        )
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(listener.getsockname()[1])


PATCH = Patch(
    name="rendezvous",
    fault="A worker that is started by hand ends with KeyError: 'RANK' or 'WORLD_SIZE'; it becomes the only one of its run.",
    reference="https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization",
    package="",
    versions="",
    apply=apply,
)
