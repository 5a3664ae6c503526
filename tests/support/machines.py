"""Machines that are not here, laid out as what the probe reads: files below a root, commands on a PATH, answers of a child."""

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.probe.machine import ANSWER, ATTENTION, Machine
from infini_llama.tasks.patch_environment.probe.probe import probe
from infini_llama.tasks.patch_environment.stage import patch_environment
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan

GIB = 1024**3
Model = TypeVar("Model", bound=BaseModel)
H100 = {"name": "H100", "capability": [9, 0], "memory": 80 * GIB, "free": 79 * GIB, "bf16": True}
T4 = {"name": "T4", "capability": [7, 5], "memory": 16 * GIB, "free": 15 * GIB, "bf16": False}
FILES = {
    "proc/cpuinfo": "processor: 0\nmodel name: Xeon\nflags: fpu avx512_bf16 amx_bf16\n",
    "proc/self/status": "Name: x\nCpus_allowed_list:\t0-7\n",
    "proc/meminfo": f"MemTotal: {64 * 1024**2} kB\nMemFree: 5 kB\nMemAvailable: {60 * 1024**2} kB\n",
    "proc/loadavg": "0.10 0.20 0.30 1/100 200\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/mounts": "/dev/sda / ext4 rw 0 0\n",
    "proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\nMax open files            1048576  1048576  files\n",
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DATA = {"source": "python-stdlib", "sequence_length": 64, "tokenizer": {"vocab_size": 512}}
LONG = {"max_steps": 10_000_000, "global_batch_size": 16, "micro_batch_size": 2}
HEADING = "| NVIDIA-SMI {version}   Driver Version: {version}   CUDA Version: {cuda} |"


def settings(environment: dict | None = None, train: dict | None = None, **sections: dict) -> PipelineConfig:
    given = {"data": {"source": "python-stdlib"}, "environment": environment or {}, "train": train or {}}
    return PipelineConfig.model_validate(given | sections)


def changed(model: Model, fields: dict) -> Model:
    """A record or a configuration with other values of these fields, which are validated."""
    return type(model).model_validate(model.model_dump() | fields)


def in_home(config: PipelineConfig, home: Path) -> PipelineConfig:
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"home": home})})


def begun(
    config: PipelineConfig, home: Path, run: str, vocab_size: int | None = None, machine: Machine | None = None
) -> EnvironmentPlan:
    """The plan of a run whose training has begun with it."""
    path = home / "runs" / run / "environment.json"
    environment = patch_environment(in_home(config, home), run, vocab_size, machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(environment.record.to_json(), indent=1))
    return environment.plan


def write_command(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def nvidia_smi(gpus: list[dict], version: str, cuda: str, busy: int | None, links: str = "NV18") -> str:
    """A shell script that answers as nvidia-smi does; a process computes on GPU number `busy`."""
    rows = "\n".join(f"{i}, GPU-{i}, {90 if i == busy else 0}, [N/A]" for i in range(len(gpus)))
    apps = "" if busy is None else f"GPU-{busy}, 4242, 30000"
    return f"""case "$*" in
*query-gpu*) echo '{rows}';;
*query-compute-apps*) echo '{apps}';;
*topo*) echo 'GPU0 X {links}';;
*) echo '{HEADING.format(version=version, cuda=cuda)}';;
esac"""


def lay_out(
    folder: Path,
    files: dict[str, str | None] | None = None,
    gpus: list[dict] | None = None,
    driver: tuple[str, str] = ("580.10", "13.0"),
    busy: int | None = None,
    fault: str = "",
    shared_memory: int = 16 * GIB,
    flash: Path | None = None,
    compiler: bool = True,
    clock: float = 0.0,
) -> Machine:
    """A machine below `folder`, with these changes of its files, GPUs and commands."""
    root, commands = folder / "machine", folder / "machine-bin"
    for name, text in (FILES | (files or {})).items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    (root / "dev/shm").mkdir(parents=True)
    commands.mkdir()
    if compiler:
        for name in ("g++", "gcc"):
            write_command(commands, name, "exit 0")
    if gpus is not None:
        (root / "dev/nvidiactl").write_text("")
        write_command(commands, "nvidia-smi", nvidia_smi(gpus, *driver, busy))
    found = json.dumps([gpu | {"uuid": str(i)} for i, gpu in enumerate(gpus or [])])
    devices = (
        f"raise RuntimeError({fault!r})" if fault else f"report['gpus'], report['nccl'] = json.loads({found!r}), True"
    )
    # Where flash-attn is the question, the real program imports what is on the path, which takes torch its seconds.
    asked = ATTENTION if flash else "import json\nreport = {'attention': {}}\n"
    path = os.pathsep.join(filter(None, (str(flash) if flash else "", os.environ.get("PYTHONPATH", ""))))

    def free(place: Path) -> int:
        return shared_memory if place.name == "shm" else 500 * GIB

    return Machine(
        root=root,
        environ={"PATH": str(commands), "PYTHONPATH": path},
        questions=asked + devices + ANSWER,
        free_bytes=free,
        clock=lambda: time.time() + clock,
    )


@pytest.fixture
def case(tmp_path: Path) -> Callable[..., tuple[PipelineConfig, MachineFacts]]:
    """build(environment, train, **layout): a small model's configuration, and the facts of a machine without GPUs."""

    def build(
        environment: dict | None = None, train: dict | None = None, **layout: Any
    ) -> tuple[PipelineConfig, MachineFacts]:
        config = settings(environment or {}, LONG | (train or {}), model=SMALL, data=DATA)
        return config, probe(tmp_path, config, lay_out(tmp_path / "machine", **layout))

    return build


def with_driver(folder: Path, **questions: Any) -> Machine:
    """This machine, but for a driver that is there."""
    (folder / "dev").mkdir(exist_ok=True)
    (folder / "dev/nvidiactl").write_text("")
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return Machine(root=folder, environ=environ, **questions)
