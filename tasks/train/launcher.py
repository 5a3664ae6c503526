"""What starts the workers of an attempt and watches over them: torchrun on this machine, or a job of a cluster."""

import json
from pathlib import Path
from types import ModuleType
from typing import Protocol

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.storage.artifacts import write_atomic

JOB = "job.json"  # in the attempt's folder: which job it is, written down before it is submitted
HUNG = "hung"  # there too: which rank was, by the word of a job's own supervisor


class Launched(Protocol):
    """The workers of one attempt, from their start to their end."""

    @property
    def outlives(self) -> bool:
        """Whether they go on without this process, and the next one of the run has to watch them."""
        ...

    def poll(self) -> int | None:
        """The exit code once all has ended, negative for a signal; None while it runs."""
        ...

    def ask_to_stop(self, grace_period: float) -> None:
        """Lets every rank save at its next step boundary and waits for the end; after `grace_period` seconds everything is killed."""
        ...

    def end(self) -> None:
        """Kills what still runs, and returns once no rank is left."""
        ...

    def cancelled(self) -> str | None:
        """Who else ended it on purpose, in words; such a run is not carried on at once."""
        ...


def write_job(attempt_dir: Path, **words: str | int | None) -> None:
    """Adds to what is known of the attempt's job."""
    write_atomic(attempt_dir / JOB, json.dumps(read_job(attempt_dir) | words, indent=1))


def read_job(attempt_dir: Path) -> dict:
    """What is known of the attempt's job; {} where it has none."""
    path = attempt_dir / JOB
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def launch(attempt_dir: Path, config: dict, plan: dict, grace_period: float, lock_fds: list[int]) -> Launched:
    """Starts the workers of `attempt_dir/order.json` where `environment.launcher` says.

    Args:
        lock_fds: the run's lock and those of its GPUs, held by workers on this machine.
    """
    wishes = config["environment"]
    if wishes["launcher"] == "slurm":
        from infini_llama.tasks.clusters import slurm

        return slurm.start(attempt_dir, wishes["slurm"], plan, grace_period)
    if wishes["launcher"] == "kubernetes":
        return _kubernetes().start(attempt_dir, wishes["kubernetes"], plan, grace_period)
    from infini_llama.tasks.train import launch as local

    return local.start(attempt_dir / "order.json", plan, grace_period, lock_fds)


def attach(attempt_dir: Path, config: dict) -> Launched | None:
    """The workers of an attempt whose process has died, where they may have outlived it; None: there are none.

    The attempt's own record says what started them, whatever the configuration says now.
    """
    launcher = read_job(attempt_dir).get("launcher")
    if launcher == "slurm":
        from infini_llama.tasks.clusters import slurm

        return slurm.attach(attempt_dir)
    if launcher == "kubernetes":
        return _kubernetes().attach(attempt_dir, config["environment"]["kubernetes"])
    return None


def _kubernetes() -> ModuleType:
    try:
        from infini_llama.tasks.clusters import kubernetes
    except ModuleNotFoundError as error:
        raise ConfigError(
            "environment.launcher=kubernetes needs Kubernetes' client; install it with `pip install 'infini-llama[kubernetes]'`, or "
            "choose another launcher."
        ) from error
    return kubernetes
