"""What patch-environment finds on a machine."""

from pydantic import Field

from infini_llama.tasks.records.record import Record


class Cpu(Record):
    """The processor. bf16: multiplies bf16 in hardware (AMX, AVX-512 or Arm); amx: by AMX."""

    model: str
    bf16: bool = False
    amx: bool = False


class Memory(Record):
    """Bytes that this process may use. limit: "machine" or "control group", whichever is tighter."""

    total: int = 0
    available: int = 0
    limit: str = "machine"


class Limits(Record):
    """Soft limits of this process; None: unlimited. file_size: bytes."""

    files: int | None = None
    processes: int | None = None
    file_size: int | None = None


class Disk(Record):
    """The file system of the home folder.

    Attributes:
        free: bytes; None: unknown.
        works: writing, syncing and renaming succeeded there; fault: the error of the one that did not.
        kind: such as ext4; network: a network file system, where locks may not reach other machines.
        skew: seconds by which the times of new files differ from this machine's clock.
        run_bytes: what the checkpoints of the configured run take already.
    """

    path: str = ""
    free: int | None = None
    works: bool = True
    fault: str = ""
    kind: str = ""
    network: bool = False
    skew: float = 0.0
    run_bytes: int = 0


class GpuProcess(Record):
    """A process that computes on a GPU. memory: bytes, where the driver reports them."""

    pid: int
    memory: int | None = None


class Gpu(Record):
    """A GPU as torch sees it.

    Attributes:
        capability: compute capability, (major, minor).
        memory, free: bytes.
        busy: share of the last second in which it computed; None: unknown.
        mig: it is a MIG slice.
    """

    name: str
    capability: tuple[int, int] = (0, 0)
    memory: int = 0
    free: int = 0
    uuid: str = ""
    bf16: bool = False
    busy: float | None = None
    mig: bool = False
    processes: tuple[GpuProcess, ...] = ()


class Driver(Record):
    """The NVIDIA driver. cuda: the newest CUDA that it runs; nvlink: GPUs are linked by NVLink."""

    version: str
    cuda: str | None = None
    nvlink: bool = False


class Compilers(Record):
    """Paths of the compilers that torch.compile uses."""

    cxx: str | None = None
    cc: str | None = None


class RunningWorker(Record):
    """A worker of infini-llama that trains on this machine."""

    pid: int
    run: str


class PortCheck(Record):
    """The port that environment.master_port requests. free: no program listens there."""

    port: int
    free: bool


class GpuFacts(Record):
    """GPUs and what needs them.

    Attributes:
        gpu_fault: why torch cannot use the GPUs; "" where it can or where there is no driver.
        nccl: torch was built with NCCL.
        attention: why each attention backend cannot be used; "" where it can be imported and, on a GPU with bf16, agrees with torch's own.
    """

    gpus: tuple[Gpu, ...]
    gpu_fault: str = ""
    nccl: bool = False
    attention: dict[str, str] = Field(default_factory=dict)
    driver: Driver | None = None


class MachineFacts(GpuFacts):
    """The facts of a machine, without assessment.

    Attributes:
        glibc: version; "" on other C libraries.
        cores: usable by this process; load: processes that want one.
        shared_memory: free bytes of /dev/shm; None: there is none.
        port: a port of the loopback interface is available; requested_port: the one of environment.master_port.
        loopback: name of the loopback interface.
        environment: variables of this process that the plan builds on.
        allocators: paths of memory allocators that can be preloaded, by name.
        others: workers of other runs.
        hub: the Hugging Face hub accepts connections; None: not tried.
        torch_cuda: the CUDA that torch was built for; None: built without.
        versions: of installed packages, by name.
    """

    host: str = ""
    platform: str = ""
    glibc: str = ""
    python: str
    cpu: Cpu
    cores: int = 0
    load: float = 0.0
    memory: Memory = Memory()
    shared_memory: int | None = None
    limits: Limits = Limits()
    disk: Disk = Disk()
    port: bool = True
    requested_port: PortCheck | None = None
    loopback: str | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    compilers: Compilers = Compilers()
    allocators: dict[str, str] = Field(default_factory=dict)
    others: tuple[RunningWorker, ...] = ()
    hub: bool | None = None
    torch_cuda: str | None = None
    versions: dict[str, str]
