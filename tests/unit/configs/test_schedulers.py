"""What schedulers tell a process about its place among the nodes."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.schedulers import refuse_several_on_a_node, with_scheduler
from infini_llama.configs.schema import EnvironmentConfig

TRAINJOB = {
    "PET_NNODES": "4",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "8",
}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}


def place(variables: dict, **settings):
    found = with_scheduler(EnvironmentConfig(**settings), variables)
    return (
        found.nnodes,
        found.node_rank,
        found.master_addr,
        found.master_port,
        found.nproc_per_node,
    )


@pytest.mark.parametrize(
    ("variables", "settings", "expected"),
    [
        ({}, {}, (1, "auto", "auto", "auto", "auto")),
        (TRAINJOB, {}, (4, 3, "run-node-0-0.run", 29400, 8)),
        (
            TRAINJOB | {"PET_NPROC_PER_NODE": "auto"},
            {},
            (4, 3, "run-node-0-0.run", 29400, "auto"),
        ),
        (
            TRAINJOB,
            {"nproc_per_node": 2, "node_rank": 0, "master_port": 1234},
            (4, 0, "run-node-0-0.run", 1234, 2),
        ),
        (
            {"PET_NNODES": "1", "PET_NODE_RANK": "0", "MASTER_ADDR": "x"},
            {},
            (1, "auto", "auto", "auto", "auto"),
        ),
        ({"JOB_COMPLETION_INDEX": "1"}, {"nnodes": 2}, (2, 1, "auto", "auto", "auto")),
        ({"JOB_COMPLETION_INDEX": "1"}, {}, (1, "auto", "auto", "auto", "auto")),
        (
            {"NODE_RANK": "1", "MASTER_ADDR": "head"},
            {"nnodes": 2},
            (2, 1, "head", "auto", "auto"),
        ),
        (STEP, {}, (2, 1, "auto", "auto", "auto")),
        (
            {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "0"},
            {},
            (1, "auto", "auto", "auto", "auto"),
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"},
            {"launcher": "srun"},
            (2, "auto", "auto", "auto", "auto"),
        ),
        (
            STEP | {"SLURM_JOB_NUM_NODES": "2"},
            {"launcher": "srun"},
            (2, "auto", "auto", "auto", "auto"),
        ),
    ],
)
def test_a_node_has_the_place_that_its_scheduler_gave_it(variables, settings, expected):
    assert place(variables, **settings) == expected


@pytest.mark.parametrize(
    ("variables", "settings", "words"),
    [
        (TRAINJOB, {"nnodes": 2}, "environment.nnodes=2"),
        ({"PET_NODE_RANK": "first"}, {"nnodes": 2}, "PET_NODE_RANK=first"),
        ({"PET_NODE_RANK": "2"}, {"nnodes": 2}, "node_rank=2"),
    ],
)
def test_a_contradiction_is_refused(variables, settings, words):
    with pytest.raises(ConfigError, match=words):
        place(variables, **settings)


@pytest.mark.parametrize(
    "environment",
    [
        {"nnodes": 2},
        {"nnodes": 2, "master_addr": "node-0.cluster", "master_port": 29500},
        {
            "nnodes": 2,
            "launcher": "srun",
            "srun_options": ["--partition=gpu", "--exclusive"],
        },
    ],
)
def test_settings_of_several_nodes_are_accepted(environment):
    parse_config({"data": {"source": "python-stdlib"}, "environment": environment})


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}, "srun"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}, "srun"),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "torchrun"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "mpirun"),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2"}, "mpiexec"),
    ],
)
def test_a_command_that_is_started_several_times_on_a_node_is_refused(
    variables, launcher
):
    with pytest.raises(ConfigError, match=rf"^{launcher} has started .* start it once"):
        refuse_several_on_a_node(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"},  # one per node
        {
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "8",
            "SLURM_NNODES": "1",
        },  # a batch script
        {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        TRAINJOB,
    ],
)
def test_a_command_that_is_started_once_per_node_is_not_refused(variables):
    refuse_several_on_a_node(variables)
