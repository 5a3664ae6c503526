"""The machine's GPUs: what torch can do with them, asked in a child process, and what the driver says of them."""

import json
import re
import subprocess
from typing import Any

from infini_llama.tasks.patch_environment.flash_faults import in_words
from infini_llama.tasks.patch_environment.probe.machine import Machine

# Driver nodes of NVIDIA on Linux and under WSL.
DRIVER_NODES = ("/dev/nvidiactl", "/dev/dxg")
SECONDS = 120.0
FP8_FROM = [8, 9]
QUERY = "index,uuid,utilization.gpu,mig.mode.current"
APPS = "gpu_uuid,pid,used_memory"


def gpus(machine: Machine, seconds: float = SECONDS) -> dict[str, Any]:
    """{"gpus", "nccl", "attention", "driver"} and, in words, "gpu_fault"; asked only where a driver is present.

    Each GPU: name, capability, memory and free (bytes), bf16, fp8, busy (share of the last second, None if unknown), mig, and
    the processes of others on it. "attention": why each backend beside sdpa cannot be imported, "" where it can.
    "driver": {"version", "cuda": the newest CUDA that it runs, "nvlink"}.
    """
    nothing: dict[str, Any] = {"gpus": [], "nccl": False, "attention": {}, "driver": None}
    hidden = machine.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # the user's way to keep GPUs out of it
    if hidden or not any(machine.path(node).exists() for node in DRIVER_NODES):
        return nothing
    nothing["driver"] = driver(machine)
    try:
        child = machine.ask_python(machine.questions, seconds)
    except subprocess.TimeoutExpired:
        return nothing | {"gpu_fault": f"torch did not answer within {seconds:g} seconds"}
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"torch ended with code {child.returncode}"])[-1]
        return nothing | {"gpu_fault": last}
    answer = nothing | json.loads(child.stdout.splitlines()[-1])
    answer["attention"] = {backend: error and in_words(error) for backend, error in answer["attention"].items()}
    said = _said_by_driver(machine)
    for index, gpu in enumerate(answer["gpus"]):
        gpu.setdefault("uuid", "")
        gpu["fp8"] = gpu["capability"] >= FP8_FROM
        # torch numbers the GPUs that CUDA_VISIBLE_DEVICES leaves; the driver numbers all of them, so identity is by uuid.
        seen = next((one for one in said if gpu["uuid"] and one["uuid"].endswith(gpu["uuid"])), None)
        if seen is None and len(said) == len(answer["gpus"]):
            seen = said[index]
        gpu |= (
            {key: seen[key] for key in ("busy", "mig", "processes")}
            if seen
            else {"busy": None, "mig": False, "processes": []}
        )
    return answer


def driver(machine: Machine) -> dict[str, Any] | None:
    """The driver's version and the newest CUDA it can run, from nvidia-smi's heading; None where it does not answer."""
    heading = machine.run("nvidia-smi") or ""
    version, cuda = (re.search(rf"{word} Version:\s*([\d.]+)", heading) for word in ("Driver", "CUDA"))
    if not version:
        return None
    links = machine.run("nvidia-smi", "topo", "-m") or ""
    return {"version": version[1], "cuda": cuda[1] if cuda else None, "nvlink": bool(re.search(r"\bNV\d+\b", links))}


def _said_by_driver(machine: Machine) -> list[dict[str, Any]]:
    found = []
    for _, uuid, busy, mig in _rows(machine, f"--query-gpu={QUERY}", 4):
        share = int(busy) / 100 if busy.isdigit() else None
        found.append({"uuid": uuid, "busy": share, "mig": mig == "Enabled", "processes": []})
    for uuid, pid, used in _rows(machine, f"--query-compute-apps={APPS}", 3):
        for gpu in found:
            if gpu["uuid"] == uuid:
                gpu["processes"].append({"pid": int(pid), "memory": int(used) * 1024**2 if used.isdigit() else None})
    return found


def _rows(machine: Machine, query: str, fields: int) -> list[list[str]]:
    """The answer's lines of so many fields; a driver may print remarks of its own among them."""
    table = machine.run("nvidia-smi", query, "--format=csv,noheader,nounits") or ""
    rows = [[word.strip() for word in line.split(",")] for line in table.splitlines()]
    return [row for row in rows if len(row) == fields]
