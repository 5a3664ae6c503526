"""The home folder, a run's full name, and the folder that a name on the command line means."""

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from infini_llama.configs.errors import ConfigError, portable
from infini_llama.configs.reading import changed, expanded
from infini_llama.configs.schedulers import unfitting, with_scheduler
from infini_llama.configs.variables import without_variables

if TYPE_CHECKING:
    from infini_llama.configs.schema import PipelineConfig


def home_folder() -> Path:
    """The home folder of commands without a configuration."""
    from infini_llama.configs.schema.runtime import default_home

    return usable_home(default_home(), "INFINI_LLAMA_HOME")


def usable_home(home: Path, name: str) -> Path:
    """The absolute path of `home`, which need not exist.

    Raises:
        ConfigError: it is a file, or lies below one, or no record can name it; `name` says where it
            was set.
    """
    try:
        path = home.expanduser().resolve()
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{name}={portable(str(home))}: the path is not UTF-8, or this locale cannot name it; "
            "choose another folder, or set PYTHONUTF8=1."
        ) from None
    except RuntimeError as fault:  # links in a circle, or a user without a home folder
        raise ConfigError(
            f"{name}={home} is no folder ({fault}); name another one."
        ) from None
    given = home.expanduser().absolute()
    for folder in (given, *given.parents):
        if folder.is_symlink() and not folder.exists():
            raise ConfigError(
                f"{name}={home}: {folder} is a link to {folder.readlink()}, which does not exist; "
                "mount its disk, or correct the link."
            )
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir():
        raise ConfigError(f"{name}={home}: {existing} is a file; name a folder.")
    return path


def find(name: str, *kinds: str) -> Path:
    """The absolute path of a folder: a path, or a name in one of these folders of the home folder.

    A pointer such as `latest` is followed, and no link to another place: what was moved belongs to
    the home that has the link.

    Raises:
        ConfigError: there is no such folder.
    """
    candidates = [Path(name), *(home_folder() / kind / name for kind in kinds)]
    for path in filter(Path.is_dir, candidates):
        path = path.resolve() if ".." in path.parts else path.absolute()
        pointed = path.readlink() if path.is_symlink() else path
        return path.with_name(pointed.name) if len(pointed.parts) == 1 else path
    for path in map(Path.absolute, candidates):
        is_pointer = path.name == "latest" and path.parent.name == "datasets"
        if is_pointer and not os.path.lexists(path):  # a filesystem without links
            complete = (
                manifest.parent for manifest in path.parent.glob("[!.]*/manifest.json")
            )
            last_used = max(
                complete, key=lambda folder: folder.stat().st_mtime, default=None
            )
            if last_used is not None:
                return last_used
    raise ConfigError(
        f"'{name}' is neither a folder nor the name of one in "
        f"{' or '.join(str(path.parent) for path in candidates[1:])}."
    )


def config_of_run(
    config: "PipelineConfig", due: datetime | None = None
) -> "PipelineConfig":
    """The resolved configuration of one run.

    It has the name in full, paths without variables, absolute paths of home and checkpoint, the
    nodes that a scheduler has set, the contents of train.deepspeed_config, and nothing of its
    deployment. It is resolved once: see `without_variables`.

    Args:
        due: scheduled start, for names with {date} or {time}, in the time zone that these are of;
            None: now, of this machine.

    Raises:
        ConfigError: a setting cannot be used here; or each node runs this command, and would
            resolve another name.
    """
    from infini_llama.configs.deepspeed import read_json
    from infini_llama.tasks.runs.checkpoints import RULES

    config = _with_scheduler(without_variables(config))
    environment = config.environment
    if (
        environment.nnodes > 1
        and environment.node_rank != "auto"
        and has_time(config.runtime.name)
    ):
        raise ConfigError(
            f"runtime.name={config.runtime.name} can differ on each of the {environment.nnodes} "
            "nodes; use a name without {date} and {time}."
        )
    home = usable_home(config.runtime.home, "runtime.home")
    name = run_name(config.runtime.name, due)
    resume = config.runtime.resume
    # Stored as an absolute path, so that the same command from another folder is recognized.
    if resume not in RULES:
        resume = str(expanded(resume).absolute())
    runtime = changed(config.runtime, home=home, name=name, resume=resume)
    train = config.train
    if train.deepspeed_config is not None:
        train = changed(train, deepspeed_config=read_json(train.deepspeed_config))
    return changed(
        config,
        train=train,
        runtime=runtime,
        deployment=type(config.deployment)(),
    )


def _with_scheduler(config: "PipelineConfig") -> "PipelineConfig":
    """The configuration with the scheduler's section `environment`."""
    try:
        return changed(
            config, environment=with_scheduler(config.environment, os.environ)
        )
    except ValidationError as fault:
        raise unfitting(fault) from fault


def run_name(template: str, due: datetime | None) -> str:
    """nightly-{date} as nightly-2026-11-21; {time} is hours, minutes and seconds."""
    moment = due or datetime.now()
    return template.replace("{date}", f"{moment:%Y-%m-%d}").replace(
        "{time}", f"{moment:%H%M%S}"
    )


def has_time(template: str) -> bool:
    """Whether the name differs for each start."""
    return "{date}" in template or "{time}" in template
