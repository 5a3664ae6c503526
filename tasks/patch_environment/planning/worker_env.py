"""The environment variables of the workers, without those of environment.env."""

from pathlib import Path

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan, Finding, finding

# Reuses freed memory instead of returning it to the kernel, which costs a page fault for every page of every large tensor.
GLIBC_TUNABLES = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456"
JEMALLOC = "dirty_decay_ms:-1,muzzy_decay_ms:-1,metadata_thp:auto"
COLLECTIVES_KEPT = "2000"  # by NCCL's flight recorder, for a report after a hang


def worker_environment(config: PipelineConfig, plan: EnvironmentPlan, facts: MachineFacts) -> dict[str, str]:
    """Variables of every worker of this plan."""
    threads, several = str(plan.threads), plan.world_size > 1
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if plan.device == "cpu" and plan.threads > 1 and facts.load >= 1:
        # Waiting threads otherwise spin, on the cores that the threads they wait for would need: with two busy neighbours on two cores,
        # steps took 3.3 times as long (3.0 to 4.6). Without neighbours, spinning saves 6 %.
        variables["OMP_WAIT_POLICY"] = "passive"
    home = config.runtime.home.absolute()
    if plan.compile != "off":
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(home / "compile-cache")
    if plan.device == "cuda":
        variables |= _cuda(plan, facts, several, home / "runs" / config.runtime.name)
    elif plan.allocator != "system":
        variables |= _memory(plan.allocator, facts)
    if plan.distributed_backend == "gloo" and several and plan.nnodes == 1 and facts.loopback:
        # All workers are on this machine; gloo would else look up the host's name, which may be slow, unknown or a VPN's. Of several
        # nodes each finds its own interface at the rendezvous (infini_llama.tasks.train.nodes).
        variables["GLOO_SOCKET_IFNAME"] = facts.loopback
    return variables


def _cuda(plan: EnvironmentPlan, facts: MachineFacts, several: bool, run: Path) -> dict[str, str]:
    variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if len(plan.gpus) < len(facts.gpus):
        visible = facts.environment.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(number) for number in range(len(facts.gpus))]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[number].strip() for number in plan.gpus)
    if several:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # keeps the order of communication and computation kernels
    if several and plan.distributed_backend == "nccl":
        # A collective that hangs ends its process after the group's timeout, and the last collectives of each rank are recorded.
        variables |= {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_BUFFER_SIZE": COLLECTIVES_KEPT,
            "TORCH_FR_DUMP_TEMP_FILE": str(run / "logs" / "nccl-rank-"),
        }
    return variables


def _memory(allocator: str, facts: MachineFacts) -> dict[str, str]:
    if allocator == "glibc":
        return {"GLIBC_TUNABLES": GLIBC_TUNABLES}
    before = facts.environment.get("LD_PRELOAD", "")
    variables = {"LD_PRELOAD": ":".join(filter(None, (facts.allocators[allocator], before)))}
    if allocator == "jemalloc":
        return variables | {"MALLOC_CONF": JEMALLOC}
    return variables | {
        "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(2**40)
    }  # else every large tensor is a line in the log


def replaced_variables(own: dict[str, str], users: dict[str, str]) -> list[Finding]:
    """A note for each variable of the plan that the configuration replaces."""
    return [
        finding(f"environment.env.{name}", users[name], "note", f"It replaces the plan's {value}.")
        for name, value in own.items()
        if users.get(name, value) != value
    ]
