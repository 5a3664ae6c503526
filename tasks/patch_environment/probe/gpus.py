"""The machine's GPUs: what torch can do with them, asked in a child process, and what the driver reports."""

import json
import re
import subprocess
from typing import NamedTuple

from infini_llama.configs.reading import changed
from infini_llama.tasks.patch_environment.patches.flash_faults import explain
from infini_llama.tasks.patch_environment.probe.machine import ANSWER, ATTENTION, Machine
from infini_llama.tasks.records.machine import Driver, Gpu, GpuFacts, GpuProcess

# Driver nodes of NVIDIA on Linux and under WSL.
DRIVER_NODES = ("/dev/nvidiactl", "/dev/dxg")
SECONDS = 120.0
QUERY = "index,uuid,utilization.gpu,mig.mode.current"
APPS = "gpu_uuid,pid,used_memory"


def gpus(machine: Machine, seconds: float = SECONDS) -> GpuFacts:
    """The GPUs as torch and the driver report them. Without a driver only an installed flash-attn is asked whether it can be imported."""
    hidden = machine.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # the user's way to keep GPUs out of it
    if hidden or not any(machine.path(node).exists() for node in DRIVER_NODES):
        return GpuFacts(gpus=(), attention=_imports(machine, seconds))
    installed = driver(machine)
    try:
        child = machine.ask_python(machine.questions, seconds)
    except subprocess.TimeoutExpired:
        return GpuFacts(gpus=(), driver=installed, gpu_fault=f"torch did not answer within {seconds:g} seconds")
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"torch ended with code {child.returncode}"])[-1]
        return GpuFacts(gpus=(), driver=installed, gpu_fault=last)
    answer = GpuFacts.from_json(json.loads(child.stdout.splitlines()[-1]))
    reports = _driver_reports(machine)
    return changed(
        answer,
        driver=installed,
        attention=explained(answer.attention),
        gpus=tuple(
            _merged(gpu, _report_of(gpu, index, len(answer.gpus), reports)) for index, gpu in enumerate(answer.gpus)
        ),
    )


def explained(faults: dict[str, str]) -> dict[str, str]:
    """What attention functions failed with, as a cause and its fix."""
    return {backend: fault and explain(fault) for backend, fault in faults.items()}


def _imports(machine: Machine, seconds: float) -> dict[str, str]:
    """Why each attention function cannot be imported, on a machine that cannot try it; {} if no package of them is installed."""
    if not machine.has_package("flash_attn"):
        return {}
    try:
        child = machine.ask_python(ATTENTION + ANSWER, seconds)
    except subprocess.TimeoutExpired:
        return {}
    return {} if child.returncode else explained(json.loads(child.stdout.splitlines()[-1])["attention"])


def driver(machine: Machine) -> Driver | None:
    """The driver, from nvidia-smi's heading; None if it does not answer."""
    heading = machine.run("nvidia-smi") or ""
    version, cuda = (re.search(rf"{word} Version:\s*([\d.]+)", heading) for word in ("Driver", "CUDA"))
    if not version:
        return None
    links = machine.run("nvidia-smi", "topo", "-m") or ""
    return Driver(version=version[1], cuda=cuda[1] if cuda else None, nvlink=bool(re.search(r"\bNV\d+\b", links)))


class _Report(NamedTuple):
    """What the driver reports about a GPU."""

    uuid: str
    busy: float | None
    mig: bool
    processes: tuple[GpuProcess, ...]


def _driver_reports(machine: Machine) -> list[_Report]:
    computing: dict[str, list[GpuProcess]] = {}
    for uuid, pid, used in _rows(machine, f"--query-compute-apps={APPS}", 3):
        process = GpuProcess(pid=int(pid), memory=int(used) * 1024**2 if used.isdigit() else None)
        computing.setdefault(uuid, []).append(process)
    return [
        _Report(uuid, int(busy) / 100 if busy.isdigit() else None, mig == "Enabled", tuple(computing.get(uuid, ())))
        for _, uuid, busy, mig in _rows(machine, f"--query-gpu={QUERY}", 4)
    ]


def _report_of(gpu: Gpu, index: int, count: int, reports: list[_Report]) -> _Report | None:
    """torch numbers the GPUs that CUDA_VISIBLE_DEVICES leaves, the driver numbers all of them: they are matched by UUID."""
    by_uuid = next((report for report in reports if gpu.uuid and report.uuid.endswith(gpu.uuid)), None)
    return reports[index] if by_uuid is None and len(reports) == count else by_uuid


def _merged(gpu: Gpu, report: _Report | None) -> Gpu:
    if report is None:
        return gpu
    return changed(gpu, busy=report.busy, mig=report.mig, processes=report.processes)


def _rows(machine: Machine, query: str, fields: int) -> list[list[str]]:
    """Lines of the answer with that many fields; a driver may print remarks among them."""
    table = machine.run("nvidia-smi", query, "--format=csv,noheader,nounits") or ""
    rows = [[word.strip() for word in line.split(",")] for line in table.splitlines()]
    return [row for row in rows if len(row) == fields]
