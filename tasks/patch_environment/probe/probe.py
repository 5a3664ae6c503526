"""Facts about this machine, without assessment. Nothing is changed."""

import importlib.util
import platform
import re
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infini_llama.configs.schema import NodeConfig, PipelineConfig
from infini_llama.tasks.patch_environment.probe import software
from infini_llama.tasks.patch_environment.probe.gpus import gpus
from infini_llama.tasks.patch_environment.probe.limits import memory, usable_cores
from infini_llama.tasks.patch_environment.probe.machine import Machine
from infini_llama.tasks.patch_environment.probe.storage import disk, free_bytes
from infini_llama.tasks.records.machine import Cpu, Gpu, MachineFacts, Memory, PortCheck

PACKAGES = (
    "torch",
    "prefect",
    "fastapi",
    "datasets",
    "tokenizers",
    "pyarrow",
    "numpy",
    "pydantic",
    "tensorboard",
    "safetensors",
    "huggingface-hub",
    "transformers",
    "triton",
    "flash-attn",
)
# Variables of this process that the plan builds on.
VARIABLES = ("LD_PRELOAD", "GLIBC_TUNABLES", "CUDA_VISIBLE_DEVICES")
BF16_FROM = (8, 0)  # compute capability


def probe(
    home: Path, config: PipelineConfig | None = None, machine: Machine | None = None, check_hub: bool = False
) -> MachineFacts:
    """Everything that `planning.plan.resolve` decides by, and what is useful to know after a failure.

    Args:
        home: folder of datasets and runs.
        config: the port that it fixes is tried, and the checkpoints of its run are counted.
        machine: None: this one.
        check_hub: try to reach the Hugging Face hub, which may take a second.
    """
    machine = machine or Machine()
    port = "auto" if config is None else config.environment.port
    return MachineFacts(
        host=socket.gethostname(),
        platform=platform.platform(),
        glibc=platform.libc_ver()[1],
        python=platform.python_version(),
        cpu=cpu(machine),
        cores=usable_cores(machine),
        load=load(machine),
        memory=memory(machine),
        shared_memory=free_bytes(machine.path("/dev/shm"), machine),
        limits=software.limits(machine),
        disk=disk(home, machine, config.runtime.name if config else None),
        port=can_listen(0),
        requested_port=None if port == "auto" else PortCheck(port=port, free=can_listen(port)),
        loopback=loopback(),
        environment={name: machine.environ[name] for name in VARIABLES if name in machine.environ},
        compilers=software.compilers(machine),
        allocators=software.allocators(machine),
        others=software.other_workers(machine),
        hub=software.is_hub_reachable(machine) if check_hub else None,
        torch_cuda=torch_cuda(),
        versions={name: found for name in PACKAGES if (found := _version(name))},
        **dict(gpus(machine)),
    )


def node_facts(facts: MachineFacts, node: NodeConfig) -> MachineFacts:
    """The facts of a cluster's node, which cannot be probed: those of this machine, except where `environment.node` has them.

    The cluster assigns a job its GPUs, so the plan takes all of them as free.
    """
    changed: dict[str, object] = {
        "gpus": tuple(gpu.model_copy(update={"busy": None, "processes": ()}) for gpu in facts.gpus)
    }
    if node.gpus is not None:
        gpus_of_node = (_node_gpu(node),) * node.gpus
        untried = {backend: fault for backend, fault in facts.attention.items() if fault}
        changed |= {"gpus": gpus_of_node, "nccl": node.gpus > 0, "driver": None, "gpu_fault": "", "attention": untried}
    if node.cores is not None:
        changed["cores"] = node.cores
    if node.memory is not None:
        changed["memory"] = Memory(total=node.memory, available=node.memory)
    return facts.model_copy(update=changed)


def _node_gpu(node: NodeConfig) -> Gpu:
    major, minor = (int(part) for part in node.gpu_capability.split("."))
    return Gpu(
        name=f"GPU of capability {node.gpu_capability}",
        capability=(major, minor),
        memory=node.gpu_memory,
        free=node.gpu_memory,
        bf16=(major, minor) >= BF16_FROM,
    )


def cpu(machine: Machine) -> Cpu:
    """The processor's name, and whether it multiplies bf16 in hardware."""
    fields: dict[str, str] = {}
    for line in machine.text("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    bf16 = any(flag in flags for flag in ("amx_bf16", "avx512_bf16", "bf16"))
    return Cpu(model=fields.get("model name", platform.machine()), bf16=bf16, amx="amx_bf16" in flags)


def load(machine: Machine) -> float:
    """Processes that want a core: the last minute's average, or those of this moment except this one, whichever is lower.

    Stages of this pipeline that have just ended count in the average only.
    """
    words = machine.text("/proc/loadavg").split()
    if len(words) < 4:
        return 0.0
    return min(float(words[0]), float(words[3].split("/")[0]) - 1)


def can_listen(port: int) -> bool:
    """Whether this port of the loopback interface (0: any) is available, as torchrun's rendezvous needs."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return True
    except OSError:
        return False


def loopback() -> str | None:
    """Name of the loopback interface, if there is one."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def torch_cuda() -> str | None:
    """The CUDA that torch was built for, read without importing it; None: built without."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^cuda\b[^=]*= '([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return found[1] if found else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
