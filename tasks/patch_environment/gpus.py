"""The machine's GPUs, as torch, in a child process, and the driver report them."""

import subprocess

from infini_llama.configs.reading import changed
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment.flash_attn_faults import (
    import_failure_cause,
)
from infini_llama.tasks.records.machine import Gpu, GpuFacts

# Driver nodes of NVIDIA on Linux and under WSL.
DRIVER_NODES = ("/dev/nvidiactl", "/dev/dxg")
SECONDS = 120.0
# Head sizes at which flash-attn is compared with torch's attention.
FLASH_HEAD_SIZES = (64, 128)


def gpus(machine: Machine, seconds: float = SECONDS) -> GpuFacts:
    """The GPUs as torch and the driver report them.

    Without a driver, it only reports whether an installed flash-attn can be imported.
    """
    # The user's way to keep GPUs out of a run.
    hidden = machine.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_driver = not hidden and any(
        machine.path(node).exists() for node in DRIVER_NODES
    )
    if not has_driver and not machine.has_package("flash_attn"):
        return GpuFacts(gpus=())
    arguments = list(machine.gpu_probe)
    if not has_driver:
        arguments.append("import")
    try:
        child = machine.run_python(*arguments, seconds=seconds)
    except subprocess.TimeoutExpired:
        return _unusable(has_driver, f"torch did not answer within {seconds:g} seconds")
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [
            f"torch ended with code {child.returncode}"
        ]
        return _unusable(has_driver, lines[-1])
    answer = GpuFacts.model_validate_json(child.stdout.splitlines()[-1])
    return changed(
        answer,
        flash_attention=answer.flash_attention
        and import_failure_cause(answer.flash_attention),
        gpus=_with_reports(answer.gpus, machine),
    )


def _unusable(has_driver: bool, fault: str) -> GpuFacts:
    return GpuFacts(gpus=(), gpu_fault=fault if has_driver else "")


def _with_reports(gpus: tuple[Gpu, ...], machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs, each with what the driver reports of it.

    torch numbers the GPUs that CUDA_VISIBLE_DEVICES leaves, the driver numbers all of them: they
    are matched by UUID.
    """
    if not gpus:
        return ()
    processes: dict[str, list[int]] = {}
    for uuid, pid in _rows(machine, "--query-compute-apps=gpu_uuid,pid", 2):
        # Some drivers do not report the process.
        if pid.isdigit():
            processes.setdefault(uuid, []).append(int(pid))
    rows = _rows(machine, "--query-gpu=uuid,driver_version,utilization.gpu", 3)
    reported: list[Gpu] = []
    for index, gpu in enumerate(gpus):
        row = next(
            (row for row in rows if gpu.uuid and row[0].endswith(gpu.uuid)), None
        )
        if row is None and len(rows) == len(gpus):
            row = rows[index]
        if row is not None:
            uuid, driver, busy = row
            share = int(busy) / 100 if busy.isdigit() else None
            users = tuple(processes.get(uuid, ()))
            gpu = changed(gpu, driver=driver, busy=share, processes=users)
        reported.append(gpu)
    return tuple(reported)


def _rows(machine: Machine, query: str, fields: int) -> list[list[str]]:
    """Lines of the answer with that many fields; a driver may print remarks among them."""
    table = machine.run("nvidia-smi", query, "--format=csv,noheader,nounits")
    rows = [[word.strip() for word in line.split(",")] for line in table.splitlines()]
    return [row for row in rows if len(row) == fields]
