"""Number, rank and address of the nodes, as schedulers set them: Kubeflow's TrainJob (PET_*), Slurm's srun, an indexed Job."""

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


def with_scheduler(
    environment: "EnvironmentConfig", variables: Mapping[str, str]
) -> "EnvironmentConfig":
    """The section with what the scheduler of this process has set, where the configuration leaves it at its default.

    Raises:
        ConfigError: a variable is not a number, or contradicts the configuration.
    """
    if (
        environment.launcher == "srun"
    ):  # this process is the supervisor; srun numbers the nodes itself
        of_nodes = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES") if "SLURM_JOB_ID" in variables else ()
        of_rank = ()
    elif variables.get("SLURM_STEP_NUM_NODES", "1") != "1":  # one process per node, started by srun
        of_nodes, of_rank = (*NNODES, "SLURM_STEP_NUM_NODES"), (*NODE_RANK, "SLURM_NODEID", INDEX)
    else:
        of_nodes, of_rank = NNODES, (*NODE_RANK, INDEX)
    started, rank = _number(variables, of_nodes), _number(variables, of_rank)
    nnodes = (
        environment.nnodes
        if "nnodes" in environment.model_fields_set or started is None
        else started
    )
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
    if environment.has_local_workers:
        if environment.master_addr == "auto" and (address := _first(variables, MASTER_ADDR)):
            changes["master_addr"] = address
        if environment.master_port == "auto" and (port := _number(variables, MASTER_PORT)):
            changes["master_port"] = port
        processes = _first(variables, NPROC) or ""
        if (
            environment.nproc_per_node == "auto" and processes.isdecimal()
        ):  # else torchrun's words auto, gpu, cpu
            changes["nproc_per_node"] = int(processes)
    try:
        return changed(environment, **changes)
    except ValidationError as fault:
        reasons = "; ".join(reason for error in fault.errors() for reason in reasons_of(error))
        raise ConfigError(
            f"the scheduler's variables do not fit the configuration: {reasons}."
        ) from fault


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((variables[name] for name in names if variables.get(name)), None)


def _number(variables: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The value of the first of these variables that is set."""
    name = next((name for name in names if variables.get(name)), None)
    if name is None:
        return None
    if not (value := variables[name]).isdecimal():
        raise ConfigError(f"{name}={value} is not a number; the scheduler sets it, or unset it.")
    return int(value)
