"""Number, rank and address of the nodes, as schedulers set them.

The schedulers are Kubeflow's TrainJob (PET_*), Slurm's srun, and an indexed Job.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.problems import reasons_of
from infini_llama.configs.reading import changed

if TYPE_CHECKING:
    from infini_llama.configs.schema import EnvironmentConfig

NNODES = ("PET_NNODES", "NNODES")
NODE_RANK = ("PET_NODE_RANK", "NODE_RANK")  # torchrun's own variable, and Lightning's
INDEX = "JOB_COMPLETION_INDEX"  # of an indexed Job
MASTER_ADDR = ("PET_MASTER_ADDR", "MASTER_ADDR")
MASTER_PORT = ("PET_MASTER_PORT", "MASTER_PORT")
NPROC = ("PET_NPROC_PER_NODE",)
# Numbers of processes that launchers have started on this machine.
LOCAL_PROCESSES = {
    "LOCAL_WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "mpirun",
    "MPI_LOCALNRANKS": "mpiexec",  # of MPICH and Intel MPI
}
START_ONCE = "start it once per machine, since it starts environment.nproc_per_node workers itself"


def with_scheduler(
    environment: "EnvironmentConfig", variables: Mapping[str, str]
) -> "EnvironmentConfig":
    """The section with what the scheduler of this process has set.

    Only what the configuration leaves at its default is taken from the scheduler.

    Raises:
        ConfigError: a variable is not a number, or contradicts the configuration.
    """
    launcher = environment.started_by
    if not launcher.has_local_workers:
        # This process is the supervisor; the launcher numbers the nodes itself.
        of_nodes = () if launcher.allocates_nodes(variables) else launcher.node_counts
        of_rank = ()
    elif variables.get("SLURM_STEP_NUM_NODES", "1") != "1":
        # Srun has started one process per node.
        of_nodes = (*NNODES, "SLURM_STEP_NUM_NODES")
        of_rank = (*NODE_RANK, "SLURM_NODEID", INDEX)
    else:
        of_nodes = NNODES
        of_rank = (*NODE_RANK, INDEX)
    started = number_in(variables, of_nodes)
    rank = number_in(variables, of_rank)
    nnodes = environment.nnodes
    if started is not None and "nnodes" not in environment.model_fields_set:
        nnodes = started
    if started is not None and started != nnodes:
        raise ConfigError(
            f"environment.nnodes={nnodes}, but the scheduler has started {started} nodes; use the "
            "same number for both, or leave the key out."
        )
    if nnodes == 1:
        return environment
    changes: dict[str, Any] = {"nnodes": nnodes}
    if environment.node_rank == "auto" and rank is not None:
        changes["node_rank"] = rank
    if launcher.has_local_workers:
        address = _first(variables, MASTER_ADDR)
        if environment.master_addr == "auto" and address:
            changes["master_addr"] = address
        if environment.master_port == "auto":
            port = number_in(variables, MASTER_PORT)
            if port:
                changes["master_port"] = port
        # Where it is not a number, it is one of torchrun's words auto, gpu and cpu.
        processes = _first(variables, NPROC) or ""
        if environment.nproc_per_node == "auto" and processes.isdecimal():
            changes["nproc_per_node"] = int(processes)
    try:
        return changed(environment, **changes)
    except ValidationError as fault:
        raise unfitting(fault) from fault


def unfitting(fault: ValidationError) -> ConfigError:
    """The error for a configuration that is valid without the scheduler's variables."""
    reasons = "; ".join(
        reason for error in fault.errors() for reason in reasons_of(error)
    )
    return ConfigError(
        f"the scheduler's variables do not fit the configuration: {reasons}."
    )


def refuse_several_on_a_node(variables: Mapping[str, str]) -> None:
    """Refuse a command that a launcher has started several times on this machine.

    Raises:
        ConfigError: it has; the command starts its workers itself.
    """
    tasks = number_in(variables, ("SLURM_STEP_NUM_TASKS",)) or 1
    if tasks > (number_in(variables, ("SLURM_STEP_NUM_NODES",)) or 1):
        started = f"srun has started this command {tasks} times (SLURM_STEP_NUM_TASKS)"
        raise ConfigError(f"{started}; {START_ONCE}, with --ntasks-per-node=1.")
    for name, launcher in LOCAL_PROCESSES.items():
        processes = number_in(variables, (name,)) or 1
        if processes > 1:
            started = (
                f"{launcher} has started this command {processes} times here ({name})"
            )
            raise ConfigError(f"{started}; {START_ONCE}, without {launcher}.")


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The value of the first of these variables that is set."""
    return next((variables[name] for name in names if variables.get(name)), None)


def number_in(variables: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The number in the first of these variables that is set.

    Raises:
        ConfigError: it is not a number.
    """
    name = next((name for name in names if variables.get(name)), None)
    if name is None:
        return None
    value = variables[name]
    if not value.isdecimal():
        raise ConfigError(
            f"{name}={value} is not a number; the scheduler sets it, or unset it."
        )
    return int(value)
