"""Facts about this machine, without assessment. Nothing is changed."""

import importlib.util
import json
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.probe import software
from infini_llama.tasks.patch_environment.probe.gpus import gpus
from infini_llama.tasks.patch_environment.probe.machine import Machine, memory, usable_cores
from infini_llama.tasks.records.machine import Cpu, Disk, MachineFacts, PortCheck
from infini_llama.tasks.runs.run_folder import size_of

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
log = logging.getLogger("infini_llama.environment")


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


def probe_by_srun(config: PipelineConfig) -> MachineFacts:
    """The facts of a node that srun allocates with environment.srun_options.

    Raises:
        ConfigError: srun is not installed.
        PipelineError: srun, or the probe on the node, failed.
    """
    one_node = ["srun", "--nodes=1", "--ntasks=1", "--input=none", *config.environment.srun_options]
    program = [sys.executable, "-m", "infini_llama.tasks.patch_environment.probe.probe", str(config.runtime.home)]
    log.info("probing a node of the cluster by srun")
    try:
        done = subprocess.run(
            [*one_node, *program], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as missing:
        raise ConfigError(
            "environment.launcher=srun, but there is no srun on PATH; run this on a machine of the Slurm cluster, or use "
            "environment.launcher=local."
        ) from missing
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise PipelineError(f"probing a node by srun failed (see environment.srun_options): {last}")
    return MachineFacts.from_json(json.loads(done.stdout.strip().splitlines()[-1]))


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


if __name__ == "__main__":
    print(json.dumps(probe(Path(sys.argv[1])).to_json()))


# Where flock may not reach other machines, and renames and listings may lag behind.
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "beegfs", "ceph", "glusterfs", "fuse.sshfs", "fuse.gcsfuse",
           "fuse.s3fs", "afs")  # fmt: skip


def disk(home: Path, machine: Machine, run: str | None = None) -> Disk:
    """The file system of `home`, and whether what a commit needs works there: write, fsync, rename of a folder.

    A home that does not exist yet is not created: the folder that it would be created in is tried.

    Args:
        run: name of the run whose checkpoints are counted.
    """
    folder = next(path for path in (home.absolute(), *home.absolute().parents) if path.exists())
    kind = file_system(folder, machine)
    facts = Disk(
        path=str(folder),
        free=free_bytes(folder, machine),
        kind=kind,
        network=kind in NETWORK,
        run_bytes=size_of(home / "runs" / run / "checkpoints") if run else 0,
    )
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".probe-") as scratch:
            before, after = Path(scratch, "before"), Path(scratch, "after")
            before.mkdir()
            with (before / "file").open("wb") as file:
                file.write(b"probe")
                file.flush()
                os.fsync(file.fileno())
            skew = round((before / "file").stat().st_mtime - machine.clock(), 1)
            before.rename(after)
    except OSError as error:
        return changed(facts, works=False, fault=error.strerror or str(error))
    return changed(facts, skew=skew)


def file_system(folder: Path, machine: Machine) -> str:
    """The kind of file system that `folder` is on, such as ext4; "" if unknown."""
    kinds = {}
    for line in machine.text("/proc/self/mounts").splitlines():
        _, point, kind, *_ = line.split(" ")
        kinds[re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point)] = kind
    above = (str(path) for path in (folder.resolve(), *folder.resolve().parents))
    return next((kinds[path] for path in above if path in kinds), "")


def free_bytes(path: Path, machine: Machine) -> int | None:
    """Free bytes of the file system of `path`; None if there is none."""
    try:
        return machine.free_bytes(path)
    except OSError:
        return None
