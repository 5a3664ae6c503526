"""Warnings and notes about a plan: what is allowed, and slow or likely to fail."""

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment import footprint
from infini_llama.tasks.patch_environment.machine import CUDA_MEMORY, GLIBC_MEMORY
from infini_llama.tasks.patch_environment.worker_variables import set_by_user
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan, Finding, finding


def findings_of(
    config: PipelineConfig, plan: EnvironmentPlan, facts: MachineFacts
) -> list[Finding]:
    """Warnings and notes of what is allowed, and slow or likely to fail."""
    findings: list[Finding] = []
    if plan.nproc_per_node * plan.threads > facts.cores:
        value = f"{plan.nproc_per_node} worker(s) x {plan.threads} thread(s)"
        sentence = (
            f"More threads than the {facts.cores} usable core(s) wait for each other; "
            "use fewer workers or threads."
        )
        findings.append(finding("threads", value, "warning", sentence))
    if plan.device == "cpu" and plan.precision == "bf16" and not facts.cpu.bf16:
        sentence = (
            "This processor has no bf16 arithmetic and emulates it slowly; "
            "use environment.precision=fp32."
        )
        findings.append(finding("precision", "bf16", "warning", sentence))
    if plan.device == "cpu" and facts.gpus:
        sentence = f"{len(facts.gpus)} GPU(s) stay unused; set environment.device=cuda to use them."
        findings.append(finding("device", "cpu", "note", sentence))
    cuda_name = set_by_user(CUDA_MEMORY, config, facts)
    if plan.device == "cuda" and cuda_name:
        sentence = "It is kept; the plan's PYTORCH_ALLOC_CONF is left out."
        findings.append(finding(cuda_name, "set", "note", sentence))
    glibc_name = set_by_user(GLIBC_MEMORY, config, facts)
    overruled = (
        plan.allocator == "glibc" and "GLIBC_TUNABLES" not in config.environment.env
    )
    if overruled and glibc_name:
        sentence = (
            "The run's allocator=glibc overrules what it sets; "
            "use environment.allocator=system to keep it."
        )
        findings.append(finding(glibc_name, "set", "warning", sentence))
    findings += _warnings_of_gpus(config, plan, facts)
    need = footprint.bytes_of_plan(config, plan)
    have = footprint.memory_per_worker(facts, plan.gpus, plan.nproc_per_node)
    if not footprint.fits(need, have):
        sentence = (
            "A worker will probably run out of memory; "
            "set train.micro_batch_size=auto or a smaller one, "
            "train.activation_checkpointing=full, or use fewer workers."
        )
        findings.append(
            finding("memory", footprint.describe(need, have), "warning", sentence)
        )
    disk_space = footprint.check_disk_space(config, facts.disk)
    if disk_space:
        findings.append(disk_space)
    return findings


def _warnings_of_gpus(
    config: PipelineConfig, plan: EnvironmentPlan, facts: MachineFacts
) -> list[Finding]:
    """Findings about GPUs that stay unused or are busy, and about their communication."""
    findings: list[Finding] = []
    if plan.device == "cuda":
        unused = _unused_gpus(config, plan, facts)
        if unused:
            findings.append(unused)
    busy = [number for number in plan.gpus if facts.gpus[number].is_busy]
    if busy:
        name = f"GPU {', '.join(map(str, busy))} in the plan"
        sentence = (
            "Another program uses it too, so memory and time may not suffice; "
            "choose others by environment.gpus."
        )
        findings.append(finding(name, "in use", "warning", sentence))
    if (
        plan.device == "cuda"
        and plan.distributed_backend == "gloo"
        and plan.world_size > 1
    ):
        sentence = (
            "Gradients go through the CPU; "
            "environment.distributed_backend=nccl is much faster."
        )
        findings.append(finding("distributed_backend", "gloo", "warning", sentence))
    return findings


def _unused_gpus(
    config: PipelineConfig, plan: EnvironmentPlan, facts: MachineFacts
) -> Finding | None:
    """A finding if GPUs stay unused.

    Where the batch is the reason, it is a warning with the batch sizes that would use all of them.
    """
    unused = len(facts.gpus) - plan.nproc_per_node
    if unused <= 0:
        return None
    sentence = f"{unused} GPU(s) stay unused."
    group = config.train.context_parallel
    free = sum(not gpu.is_busy for gpu in facts.gpus) // group * group
    if (
        config.environment.nproc_per_node != "auto"
        or config.environment.gpus != "auto"
        or plan.nproc_per_node >= free
    ):
        return finding("workers", plan.nproc_per_node, "note", sentence)
    # With any micro-batch: what each of them takes at once is chosen after the number of workers.
    batch = config.train.global_batch_size
    share = config.train.least_micro_batch * free * plan.nnodes // group
    if batch % share == 0:
        sentence += (
            f" The run keeps {plan.nproc_per_node} worker(s); "
            f"set environment.nproc_per_node={free} to use all of them."
        )
        return finding("workers", plan.nproc_per_node, "note", sentence)
    below = batch // share * share
    sizes = [str(size) for size in (below, below + share) if size]
    sentence += (
        f" train.global_batch_size={batch} cannot be divided among {free}; "
        f"{' or '.join(sizes)} uses all of them."
    )
    return finding("workers", plan.nproc_per_node, "warning", sentence)
