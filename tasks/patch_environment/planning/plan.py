"""The plan: what the workers run on and why, from the configuration and the machine's facts."""

import logging
from pathlib import Path
from typing import Literal

from infini_llama.configs.reading import JsonObject
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.patches.registry import needed_patches
from infini_llama.tasks.patch_environment.planning import estimate, speed
from infini_llama.tasks.patch_environment.planning.choices import Choices, refuse
from infini_llama.tasks.patch_environment.planning.devices import choose_device, choose_workers
from infini_llama.tasks.patch_environment.planning.estimate import check_disk_space
from infini_llama.tasks.patch_environment.planning.findings import is_busy
from infini_llama.tasks.records.machine import MachineFacts, PortCheck
from infini_llama.tasks.records.plan import EnvironmentPlan, Finding, PinnedSettings, finding

log = logging.getLogger("infini_llama.environment")
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
# Reuses freed memory instead of returning it to the kernel, which costs a page fault for every page of every large tensor.
GLIBC_TUNABLES = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456"
JEMALLOC = "dirty_decay_ms:-1,muzzy_decay_ms:-1,metadata_thp:auto"
COLLECTIVES_KEPT = "2000"  # by NCCL's flight recorder, for a report after a hang


def resolve(config: PipelineConfig, facts: MachineFacts, pinned: PinnedSettings | None = None) -> EnvironmentPlan:
    """The plan of a run. What the configuration sets explicitly is taken or refused, never replaced.

    Args:
        pinned: of the run's first attempt, None before it: kept wherever the configuration leaves a setting open and this machine
            supports it. What it does not support is logged as a warning. Where the run goes to another device, nothing is kept, as it
            was chosen for the other one.

    Raises:
        ConfigError: one line per setting that this machine cannot run.
    """
    settings, train, choices = config.environment, config.train, Choices()
    device = choose_device(settings, facts, pinned, choices)
    if pinned is not None and pinned.device != device:
        pinned = None
    devices = choose_workers(config, device, facts, pinned, choices)
    precision = speed.precision(config, devices, facts, pinned, choices)
    micro = estimate.micro_batch_size(config, facts, precision, devices, pinned, choices)
    tokens = micro * config.data.sequence_length // train.context_parallel
    plan = EnvironmentPlan(
        device=device,
        gpus=devices.gpus,
        nproc_per_node=devices.processes,
        nnodes=settings.nnodes,
        master_addr=settings.master_addr,
        precision=precision,
        attention_backend=speed.attention(config, devices, precision, facts, pinned, choices),
        allocator=speed.allocator(config, device, facts, pinned, choices),
        compile=speed.compilation(train, device, facts, pinned, choices),
        loss_chunk=speed.loss_chunk(config, device, tokens, pinned, choices),
        threads=speed.threads(config, devices, facts, pinned, choices),
        distributed_backend=speed.backend(config, device, facts.nccl, choices),
        port=_port(facts.requested_port, choices),
        micro_batch_size=micro,
        reasons=choices.reasons,
        patches=tuple(patch.name for patch in needed_patches(facts.versions)),
    )
    for name, value in settings.env.items():
        if name in SET_BY_TORCHRUN:
            choices.refuse(f"environment.env.{name}={value}, but torchrun sets {name} for each worker; remove it.")
    refuse(choices.problems)
    for sentence in choices.given_up:
        log.warning("this machine cannot use the run's original plan: %s", sentence)
    variables = worker_environment(config, plan, facts)
    findings = (*_warnings(config, plan, facts), *replaced_variables(variables, settings.env))
    return plan.with_environment(variables | settings.env, findings)


def explicit(config: PipelineConfig) -> JsonObject:
    """Those of the pinned settings that the configuration sets, by name."""
    settings = config.train.model_dump(mode="json") | config.environment.model_dump(mode="json")
    requested = {name: settings[name] for name in PinnedSettings.model_fields}
    return {name: value for name, value in requested.items() if value != "auto"}


def _port(requested: PortCheck | None, choices: Choices) -> int | Literal["auto"]:
    if requested is None:
        return "auto"
    if not requested.free:
        choices.refuse(
            f"environment.master_port={requested.port}, but another program listens there; end it, choose another port or use auto."
        )
    return requested.port


def _warnings(config: PipelineConfig, plan: EnvironmentPlan, facts: MachineFacts) -> list[Finding]:
    """What is allowed, and slow or likely to fail."""
    found = []
    if plan.nproc_per_node * plan.threads > facts.cores:
        sentence = (
            f"More threads than the {facts.cores} usable core(s) wait for each other; use fewer workers or threads."
        )
        value = f"{plan.nproc_per_node} worker(s) x {plan.threads} thread(s)"
        found.append(finding("threads", value, "warning", sentence))
    if plan.device == "cpu" and plan.precision == "bf16" and not facts.cpu.bf16:
        sentence = "This processor has no bf16 arithmetic and emulates it slowly; use environment.precision=fp32."
        found.append(finding("precision", "bf16", "warning", sentence))
    if plan.device == "cuda":
        found += _gpu_warnings(config, plan, facts)
    elif facts.gpus:
        sentence = f"{len(facts.gpus)} GPU(s) stay unused; set environment.device=cuda to use them."
        found.append(finding("device", "cpu", "note", sentence))
    need = estimate.bytes_of_plan(config, plan)
    have = estimate.memory_per_worker(facts, plan.gpus, plan.nproc_per_node)
    if not estimate.fits(need, have):
        sentence = (
            "A worker will probably run out of memory; set train.micro_batch_size=auto or a smaller one, "
            "train.activation_checkpointing=full, or use fewer workers."
        )
        found.append(finding("memory", estimate.describe(need, have), "warning", sentence))
    if lack := check_disk_space(config, facts.disk):
        found.append(lack)
    return found


def _unused(config: PipelineConfig, plan: EnvironmentPlan, facts: MachineFacts) -> list[Finding]:
    """A finding if GPUs stay unused: a warning with the batch sizes that would use all, where the batch is the reason."""
    unused = len(facts.gpus) - plan.nproc_per_node
    if unused <= 0:
        return []
    sentence = f"{unused} GPU(s) stay unused."
    free = sum(not is_busy(gpu) for gpu in facts.gpus)
    if config.environment.nproc_per_node != "auto" or config.environment.gpus != "auto" or plan.nproc_per_node >= free:
        return [finding("workers", plan.nproc_per_node, "note", sentence)]
    # With any micro-batch: what each of them takes at once is chosen after the number of workers.
    micro, batch = config.train.micro_batch_size, config.train.global_batch_size
    share = (1 if micro == "auto" else micro) * free * plan.nnodes // config.train.context_parallel
    sizes = [str(size) for size in (batch // share * share, (batch // share + 1) * share) if size]
    sentence += (
        f" train.global_batch_size={batch} cannot be divided among {free}; {' or '.join(sizes)} uses all of them."
    )
    return [finding("workers", plan.nproc_per_node, "warning", sentence)]


def _gpu_warnings(config: PipelineConfig, plan: EnvironmentPlan, facts: MachineFacts) -> list[Finding]:
    found = _unused(config, plan, facts)
    if busy := [number for number in plan.gpus if is_busy(facts.gpus[number])]:
        names = ", ".join(map(str, busy))
        sentence = "Another program uses it too, so memory and time may not suffice; choose others by environment.gpus."
        found.append(finding(f"GPU {names} in the plan", "in use", "warning", sentence))
    if plan.distributed_backend == "gloo" and plan.world_size > 1:
        sentence = "Gradients go through the CPU; environment.distributed_backend=nccl is much faster."
        found.append(finding("distributed_backend", "gloo", "warning", sentence))
    if plan.distributed_backend == "nccl" and sum(facts.gpus[number].mig for number in plan.gpus) > 1:
        sentence = "NCCL does not work between MIG slices of one card; use environment.nproc_per_node=1."
        found.append(finding("MIG", plan.nproc_per_node, "warning", sentence))
    return found


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
