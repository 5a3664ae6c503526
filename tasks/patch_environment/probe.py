"""Collects the facts that a plan depends on: of this machine, or of a node of a cluster."""

import json
import logging
import platform
import resource
import socket
import subprocess
import sys
from pathlib import Path

from infini_llama.configs.errors import PipelineError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.machine import Machine, memory, usable_cores
from infini_llama.tasks.patch_environment.gpus import gpus
from infini_llama.tasks.patch_environment.machine import (
    compilers,
    cpu,
    disk,
    exported,
    folders,
    free_bytes,
    is_port_free,
    limit_of,
    load,
    loopback_fault,
    shared_memory_fault,
    versions,
)
from infini_llama.tasks.records.machine import MachineFacts

log = logging.getLogger("infini_llama.environment")


def probe(
    home: Path, config: PipelineConfig | None = None, machine: Machine | None = None
) -> MachineFacts:
    """The facts that `plan.plan_environment` decides by, and those that help after a failure.

    Args:
        home: folder of datasets and runs.
        config: the port that it fixes is tried, and the checkpoints of its run are counted.
        machine: None: this one.
    """
    machine = machine or Machine()
    port = "auto" if config is None else config.environment.master_port
    return MachineFacts(
        host=socket.gethostname(),
        platform=platform.platform(),
        glibc=platform.libc_ver()[1],
        python=platform.python_version(),
        cpu=cpu(machine),
        cores=usable_cores(machine),
        load=load(machine),
        memory=memory(machine),
        open_files=limit_of(resource.RLIMIT_NOFILE),
        address_space=limit_of(resource.RLIMIT_AS),
        shared_memory=free_bytes(machine.path("/dev/shm"), machine),
        shared_memory_fault=shared_memory_fault(machine),
        folders=folders(machine),
        disk=disk(home, machine, config.runtime.name if config else None),
        occupied_port=None if port == "auto" or is_port_free(port) else port,
        loopback_fault=loopback_fault(),
        visible_gpus=machine.environ.get("CUDA_VISIBLE_DEVICES", ""),
        exported=exported(machine),
        compilers=compilers(machine),
        versions=versions(),
        **dict(gpus(machine)),
    )


def probe_by_launcher(config: PipelineConfig) -> MachineFacts:
    """The facts of a node that the launcher allocates with environment.srun_options.

    Raises:
        ConfigError: the launcher's program is not installed.
        PipelineError: the program, or the probe on the node, failed.
    """
    launcher = config.environment.started_by
    on_one_node = [
        launcher.program,
        *launcher.on_one_node,
        *config.environment.srun_options,
    ]
    module = "infini_llama.tasks.patch_environment.probe"
    log.info("probing a node of the cluster by %s", launcher.program)
    try:
        done = subprocess.run(
            [
                *on_one_node,
                sys.executable,
                "-P",
                "-m",
                module,
                str(config.runtime.home),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as missing:
        raise launcher.not_installed() from missing
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        last = lines[-1] if lines else "no output"
        raise PipelineError(
            f"probing a node by {launcher.program} failed "
            f"(see environment.{launcher.name}_options): {last}"
        )
    answer = done.stdout.strip().splitlines()[-1]
    return MachineFacts.model_validate(json.loads(answer))


if __name__ == "__main__":
    print(json.dumps(probe(Path(sys.argv[1])).to_json()))
