"""What torch can do with this machine's GPUs, asked in a child process: no torch and no CUDA context stays in the caller."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Driver nodes of NVIDIA on Linux and under WSL.
DRIVER_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
SECONDS = 120.0
# flash-attn is believed by running it: an import may succeed where the kernels do not fit the GPU.
QUESTIONS = """
import json, torch
report = {"gpus": [], "nccl": torch.distributed.is_nccl_available(), "flash_attn": False}
torch.cuda.init()
for index in range(torch.cuda.device_count()):
    with torch.cuda.device(index):
        p = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    report["gpus"].append({"name": p.name, "capability": [p.major, p.minor], "memory": total, "free": free, "bf16": bf16})
try:
    from flash_attn import flash_attn_func
    q = torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    flash_attn_func(q, q, q, causal=True).sum().backward()
    torch.cuda.synchronize()
    report["flash_attn"] = True
except ModuleNotFoundError as error:
    report["flash_attn_error"] = "it is not installed" if error.name == "flash_attn" else str(error)
except BaseException as error:
    report["flash_attn_error"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(report))
"""


def gpus(
    nodes: tuple[Path, ...] = DRIVER_NODES, questions: str = QUESTIONS, seconds: float = SECONDS
) -> dict[str, Any]:
    """{"gpus", "nccl", "flash_attn"} and, in words, "gpu_fault" or "flash_attn_error"; asked only where a driver is present."""
    nothing: dict[str, Any] = {"gpus": [], "nccl": False, "flash_attn": False}
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # the user's way to keep GPUs out of it
    if hidden or not any(node.exists() for node in nodes):
        return nothing
    try:
        child = subprocess.run(
            [sys.executable, "-c", questions], capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return nothing | {"gpu_fault": f"torch did not answer within {seconds:g} seconds"}
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"torch ended with code {child.returncode}"])[-1]
        return nothing | {"gpu_fault": last}
    return json.loads(child.stdout.splitlines()[-1])
