"""The launcher of a run's workers: torchrun on this machine, the first of several nodes, or a job of a cluster."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import EnvironmentConfig
from infini_llama.tasks.clusters import slurm
from infini_llama.tasks.clusters.node_records import read_submitted
from infini_llama.tasks.clusters.rendezvous import FirstNode
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.train.launch import LocalLauncher, spawn
from infini_llama.tasks.train.launcher import Launched

LOCAL = LocalLauncher()


@dataclass(frozen=True)
class ConfiguredLauncher:
    """The launcher that `environment.launcher` names.

    Args:
        environment: section of the configuration.
    """

    environment: EnvironmentConfig

    def start(self, attempt_dir: Path, plan: EnvironmentPlan, grace_period: float, lock_fds: list[int]) -> Launched:
        """Start the workers of the job in `attempt_dir`; see `Launcher`."""
        launcher = self.environment.launcher
        if launcher == "slurm":
            return slurm.start(attempt_dir, self.environment.slurm, plan, grace_period)
        if launcher == "kubernetes":
            return _kubernetes().start(attempt_dir, self.environment.kubernetes, plan, grace_period)
        if plan.nnodes == 1:
            return LOCAL.start(attempt_dir, plan, grace_period, lock_fds)
        agent = [sys.executable, "-m", "infini_llama.tasks.clusters.node", str(attempt_dir), "--node-rank=0"]
        log = attempt_dir / "torchrun.log"
        process = spawn(agent, log, plan.env, grace_period, lock_fds, new_session=True)
        return FirstNode(process, attempt_dir, plan.world_size)

    def attach(self, attempt_dir: Path) -> Launched | None:
        """The workers of an attempt whose command has died, if they may be detached from it; None: there are none."""
        submitted = read_submitted(attempt_dir)
        if submitted is None:
            return None
        if submitted.launcher == "slurm":
            return slurm.attach(attempt_dir, submitted)
        return _kubernetes().attach(attempt_dir, submitted, self.environment.kubernetes)


def _kubernetes() -> ModuleType:
    try:
        from infini_llama.tasks.clusters import kubernetes
    except ModuleNotFoundError as error:
        raise ConfigError(
            "environment.launcher=kubernetes needs Kubernetes' client; install it with `pip install 'infini-llama[kubernetes]'`, or "
            "choose another launcher."
        ) from error
    return kubernetes
