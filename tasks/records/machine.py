"""Facts of a machine that patch-environment found."""

from infini_llama.tasks.records.record import Record

BUSY_SHARE = 0.2  # of the last second
IDLE_FREE = 0.8  # of a GPU's memory; an idle driver and desktop take less than the rest


class Cpu(Record):
    """The processor.

    Attributes:
        bf16: multiplies bf16 in hardware (AMX, AVX-512 or Arm).
        amx: multiplies it by AMX.
    """

    model: str
    bf16: bool = False
    amx: bool = False


class Memory(Record):
    """Bytes that this process may use.

    Attributes:
        limit: "machine" or "control group", whichever is tighter.
    """

    total: int = 0
    available: int = 0
    limit: str = "machine"


class Disk(Record):
    """The file system of the home folder.

    Attributes:
        free: bytes; None: unknown.
        fault: what fails there that datasets and runs need; "" where all works.
        has_links: symbolic links work.
        kind: such as ext4.
        network: a network file system, where locks may not reach other machines.
        run_bytes: what the checkpoints of the configured run take already.
    """

    path: str = ""
    free: int | None = None
    fault: str = ""
    has_links: bool = True
    kind: str = ""
    network: bool = False
    run_bytes: int = 0


class Folder(Record):
    """A folder that libraries write into.

    Attributes:
        setting: the variable that names it.
        fault: what fails there; "" where all works.
    """

    setting: str
    path: str
    fault: str = ""


class Gpu(Record):
    """A GPU as torch and its driver see it.

    Attributes:
        capability: compute capability, (major, minor).
        memory, free: bytes.
        driver: its version; "" where the driver does not report it.
        busy: share of the last second in which it computed; None: unknown.
        processes: IDs of the processes that compute on it.
    """

    name: str
    capability: tuple[int, int] = (0, 0)
    memory: int = 0
    free: int = 0
    uuid: str = ""
    bf16: bool = False
    driver: str = ""
    busy: float | None = None
    processes: tuple[int, ...] = ()

    @property
    def is_busy(self) -> bool:
        """Whether another program computes on it or has much of its memory."""
        return (
            bool(self.processes)
            or (self.busy or 0.0) > BUSY_SHARE
            or self.free < IDLE_FREE * self.memory
        )


class Compilers(Record):
    """Paths of the compilers that torch.compile uses."""

    cxx: str | None = None
    cc: str | None = None


class GpuFacts(Record):
    """GPUs and what needs them.

    Attributes:
        gpu_fault: why torch cannot use the GPUs; "" where it can or where there is no driver.
        nccl: torch was built with NCCL.
        flash_attention: why flash-attn cannot be used; "" where it can be imported and, on a GPU
            with bf16, agrees with torch's own attention; None: it was not tried.
    """

    gpus: tuple[Gpu, ...]
    gpu_fault: str = ""
    nccl: bool = False
    flash_attention: str | None = None


class MachineFacts(GpuFacts):
    """The facts of a machine, without assessment.

    Attributes:
        glibc: version; "" on other C libraries.
        cores: usable by this process.
        load: processes that need a core.
        open_files: that a process may have at a time (ulimit -n); None: any number.
        address_space: bytes that a process may map (ulimit -v); None: any number.
        shared_memory: free bytes of /dev/shm; None: there is none.
        shared_memory_fault: what fails there; "" where all works.
        folders: the user's home folder, Prefect's where the user names one, and that of temporary
            files.
        occupied_port: environment.master_port, where another program listens there.
        loopback_fault: why this machine does not reach itself at 127.0.0.1; "" where it does.
        visible_gpus: CUDA_VISIBLE_DEVICES of this process.
        exported: names of variables of this process that a plan does not replace.
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
    open_files: int | None = None
    address_space: int | None = None
    shared_memory: int | None = None
    shared_memory_fault: str = ""
    folders: tuple[Folder, ...] = ()
    disk: Disk = Disk()
    occupied_port: int | None = None
    loopback_fault: str = ""
    visible_gpus: str = ""
    exported: tuple[str, ...] = ()
    compilers: Compilers = Compilers()
    versions: dict[str, str]
