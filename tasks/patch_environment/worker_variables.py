"""Environment variables of a run's workers."""

import os
from collections.abc import Sequence

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.machine import CUDA_MEMORY, THREAD_WAITING
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan

# torchrun sets these for each worker; one value for all would make every worker the same rank.
SET_BY_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
OF_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Reuses freed memory instead of returning it to the kernel, which costs a page fault for every page
# of every large tensor: the lanes "as shipped" and "our allocator" of
# benchmarks/results/training.json differ in this alone.
GLIBC_TUNABLES = (
    "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:"
    "glibc.malloc.top_pad=268435456"
)


def set_by_user(
    names: Sequence[str], config: PipelineConfig, facts: MachineFacts
) -> str:
    """The first of these variables that is in `environment.env` or exported; "" where none is."""
    set_names = (
        name
        for name in names
        if name in config.environment.env or name in facts.exported
    )
    return next(set_names, "")


def worker_environment(
    config: PipelineConfig, plan: EnvironmentPlan, facts: MachineFacts
) -> dict[str, str]:
    """Variables of every worker of this plan."""
    variables = dict.fromkeys(OF_THREADS, str(plan.threads)) | {
        "TOKENIZERS_PARALLELISM": "false"
    }
    if (
        plan.device == "cpu"
        and plan.threads > 1
        and not set_by_user(THREAD_WAITING, config, facts)
    ):
        # Waiting threads otherwise spin for milliseconds, on the cores that the threads they wait
        # for would need: beside busy neighbours, steps took several times as long as with threads
        # that sleep at once. Without neighbours, spinning saves some percent, and a spin of some
        # 100 microseconds saved as much. Seen once on two cores; no result is stored.
        if facts.load >= 1:
            variables["OMP_WAIT_POLICY"] = "passive"
        else:
            variables["GOMP_SPINCOUNT"] = "10000"
    if plan.compile != "off":
        in_home = str(config.runtime.home.absolute() / "compile-cache")
        # The user's: programs may not be loaded from the disk of the home folder (noexec), or it
        # may be a slow one.
        variables["TORCHINDUCTOR_CACHE_DIR"] = (
            os.environ.get("TORCHINDUCTOR_CACHE_DIR") or in_home
        )
    if plan.device == "cuda":
        if not set_by_user(CUDA_MEMORY, config, facts):
            variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        if len(plan.gpus) < len(facts.gpus):
            names = [str(number) for number in range(len(facts.gpus))]
            if facts.visible_gpus:
                names = facts.visible_gpus.split(",")
            used = [names[number].strip() for number in plan.gpus]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(used)
    if plan.allocator == "glibc":
        # The last value of a tunable holds.
        tunables = [os.environ.get("GLIBC_TUNABLES"), GLIBC_TUNABLES]
        variables["GLIBC_TUNABLES"] = ":".join(filter(None, tunables))
    return variables
