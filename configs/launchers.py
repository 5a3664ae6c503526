"""The launchers that `environment.launcher` names, without what starts workers by them.

That is a class in `WORKERS` of tasks/train/launch.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from infini_llama.configs.choices import Choice
from infini_llama.configs.errors import ConfigError


@dataclass(frozen=True)
class Launcher(Choice):
    """What starts torchrun on the nodes of a run.

    Attributes:
        program: starts torchrun on every node; "": this process starts it, on this machine.
        place: where the program is found, for a message.
        on_one_node: arguments with which the program runs a command once, on a node.
        allocation: variable that is set where the nodes are allocated already.
        node_counts: variables with the number of nodes of that allocation.
        node_rank: variable with a node's number, which the program sets on it.
    """

    name: str
    program: str = ""
    place: str = ""
    on_one_node: tuple[str, ...] = ()
    allocation: str = ""
    node_counts: tuple[str, ...] = ()
    node_rank: str = ""

    @property
    def has_local_workers(self) -> bool:
        """Whether torchrun runs on this machine."""
        return not self.program

    def allocates_nodes(self, variables: Mapping[str, str]) -> bool:
        """Whether the workers' nodes are other machines, which are allocated at each start."""
        return not self.has_local_workers and self.allocation not in variables

    def not_installed(self) -> ConfigError:
        """The program is not on PATH."""
        return ConfigError(
            f"environment.launcher={self.name}, but there is no {self.program} on PATH; "
            f"run this on {self.place}, or use environment.launcher=local."
        )


LOCAL = Launcher(name="local", description="torchrun on this machine.")
SRUN = Launcher(
    name="srun",
    description="torchrun by Slurm's srun on every node of the allocation that this command runs "
    "in, or of one that srun requests.",
    program="srun",
    place="a machine of the Slurm cluster",
    on_one_node=("--nodes=1", "--ntasks=1", "--input=none"),
    allocation="SLURM_JOB_ID",
    node_counts=("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    node_rank="SLURM_NODEID",
)
LAUNCHERS = {launcher.name: launcher for launcher in (LOCAL, SRUN)}
