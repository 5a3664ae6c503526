"""Machines that are not here, laid out as what the probe reads: files below a root, commands on a PATH, answers of a child."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment.stage import patch_environment
from infini_llama.tasks.records.plan import EnvironmentPlan, EnvironmentRecord
from infini_llama.tasks.runs.run_folder import RunFolder

GIB = 1024**3
H100 = {
    "name": "H100",
    "capability": [9, 0],
    "memory": 80 * GIB,
    "free": 79 * GIB,
    "bf16": True,
}
T4 = {
    "name": "T4",
    "capability": [7, 5],
    "memory": 16 * GIB,
    "free": 15 * GIB,
    "bf16": False,
}
FILES = {
    "proc/cpuinfo": "processor: 0\nmodel name: Xeon\nflags: fpu avx512_bf16 amx_bf16\n",
    "proc/self/status": "Name: x\nCpus_allowed_list:\t0-7\n",
    "proc/meminfo": f"MemTotal: {64 * 1024**2} kB\nMemFree: 5 kB\nMemAvailable: {60 * 1024**2} kB\n",
    "proc/loadavg": "0.10 0.20 0.30 1/100 200\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/mounts": "/dev/sda / ext4 rw 0 0\n",
}


def settings(
    environment: dict | None = None, train: dict | None = None, **sections: dict
) -> PipelineConfig:
    required = {
        "data": {"source": "python-stdlib"},
        "environment": environment or {},
        "train": train or {},
    }
    return PipelineConfig.model_validate(required | sections)


def in_home(config: PipelineConfig, home: Path, run: str = "run") -> PipelineConfig:
    return config.model_copy(
        update={
            "runtime": config.runtime.model_copy(update={"home": home, "name": run})
        }
    )


def begun(
    config: PipelineConfig,
    home: Path,
    run: str,
    vocab_size: int | None = None,
    machine: Machine | None = None,
) -> EnvironmentPlan:
    """The plan of a run whose training has begun with it."""
    folder = RunFolder(home / "runs" / run)
    environment = patch_environment(in_home(config, home, run), vocab_size, machine)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write(folder.environment, environment.record)
    return environment.plan


def record_of(home: Path) -> EnvironmentRecord:
    """The record of the run `run`."""
    folder = RunFolder(home / "runs" / "run")
    return folder.read(EnvironmentRecord, folder.environment)


def reason_of(plan: EnvironmentPlan, setting: str) -> str:
    """Why the plan gave a setting its value; "" where the configuration sets it."""
    return next(
        (choice.reason for choice in plan.choices if choice.setting == setting), ""
    )


def write_command(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def nvidia_smi(gpus: list[dict], busy: int | None) -> str:
    """A shell script that answers as nvidia-smi does; a process computes on GPU number `busy`."""
    rows = "\n".join(
        f"GPU-{i}, 580.10, {90 if i == busy else 0}" for i in range(len(gpus))
    )
    apps = "" if busy is None else f"GPU-{busy}, 4242"
    return f"""case "$*" in
*query-gpu*) echo '{rows}';;
*query-compute-apps*) echo '{apps}';;
esac"""


def lay_out(
    folder: Path,
    files: dict[str, str] | None = None,
    gpus: list[dict] | None = None,
    busy: int | None = None,
    gpu_fault: str = "",
    shared_memory: int = 16 * GIB,
    flash: Path | None = None,
    compiler: bool = True,
) -> Machine:
    """A machine below `folder`, with these changes of its files, GPUs and commands.

    Args:
        busy: number of a GPU on which another process computes.
        gpu_fault: why torch cannot use the GPUs.
        flash: folder with a package flash_attn, which is really imported; that takes torch its seconds.
    """
    root, commands = folder / "machine", folder / "machine-bin"
    for name, text in (FILES | (files or {})).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "dev/shm").mkdir(parents=True)
    commands.mkdir()
    for name in ("g++", "gcc") if compiler else ():
        write_command(commands, name, "exit 0")
    if gpus is not None:
        (root / "dev/nvidiactl").write_text("")
        write_command(commands, "nvidia-smi", nvidia_smi(gpus, busy))
    answer = {
        "gpus": [gpu | {"uuid": str(i)} for i, gpu in enumerate(gpus or [])],
        "nccl": True,
    }
    lines = [f"import json; answer = json.loads({json.dumps(answer)!r})"]
    if gpu_fault:
        lines.append(f"raise RuntimeError({gpu_fault!r})")
    if flash:
        lines.append(
            "from infini_llama.tasks.patch_environment.gpu_probe import flash_fault"
        )
        lines.append("answer['flash_attention'] = flash_fault(on_gpu=False)")
    lines.append("print(json.dumps(answer))")

    def free(path: Path) -> int:
        return shared_memory if path.name == "shm" else 500 * GIB

    paths = os.pathsep.join(
        filter(None, (str(flash) if flash else "", os.environ.get("PYTHONPATH", "")))
    )
    return Machine(
        root=root,
        environ={"PATH": str(commands), "PYTHONPATH": paths},
        gpu_probe=("-c", "\n".join(lines)),
        free_bytes=free,
    )


def with_driver(folder: Path, **probe: Any) -> Machine:
    """This machine, but for a driver that is there."""
    (folder / "dev").mkdir(exist_ok=True)
    (folder / "dev/nvidiactl").write_text("")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name != "CUDA_VISIBLE_DEVICES"
    }
    return Machine(root=folder, environ=environ, **probe)
