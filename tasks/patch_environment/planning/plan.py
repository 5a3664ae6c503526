"""The plan: what the workers run on and why, from the configuration and the machine's facts."""

from typing import Literal

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.patches.registry import needed_patches
from infini_llama.tasks.patch_environment.planning import estimate, speed
from infini_llama.tasks.patch_environment.planning.devices import Notes, choose_devices, refuse
from infini_llama.tasks.patch_environment.planning.disk_space import check_disk_space
from infini_llama.tasks.patch_environment.planning.findings_gpu import is_busy
from infini_llama.tasks.patch_environment.planning.worker_env import replaced_variables, worker_environment
from infini_llama.tasks.records.machine import MachineFacts, PortCheck
from infini_llama.tasks.records.plan import EnvironmentPlan, Finding, finding

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


def resolve(config: PipelineConfig, facts: MachineFacts) -> EnvironmentPlan:
    """The plan of a run. What the configuration sets explicitly is taken or refused, never replaced.

    Raises:
        ConfigError: one line per setting that this machine cannot run.
    """
    settings, train, notes = config.environment, config.train, Notes()
    micro = train.micro_batch_size
    devices = choose_devices(config, facts, 1 if micro == "auto" else micro, notes)
    device = devices.device
    precision = speed.precision(config, devices, facts, notes)
    if micro == "auto":
        micro = estimate.micro_batch(config, facts, precision, devices)
        notes.explain(
            "micro_batch_size",
            "the largest that fits into memory by the estimate and is still faster",
        )
    threads = settings.threads
    if threads == "auto":
        threads = max(1, facts.cores // devices.processes)
        notes.explain("threads", f"{facts.cores} usable core(s) over {devices.processes} worker(s)")
    tokens = micro * config.data.sequence_length // train.context_parallel
    groups = train.groups(devices.processes * settings.nnodes)
    plan = EnvironmentPlan(
        device=device,
        gpus=devices.gpus,
        nproc_per_node=devices.processes,
        nnodes=settings.nnodes,
        master_addr=settings.master_addr,
        precision=precision,
        attention_backend=speed.attention(config, devices, precision, facts, notes),
        allocator=speed.allocator(config, device, facts, notes),
        compile=speed.compilation(train, device, facts, notes),
        loss_chunk=speed.loss_chunk(train.loss_chunk, device, tokens, config.data.tokenizer.vocab_size, notes),
        threads=threads,
        distributed_backend=speed.backend(config, device, facts.nccl, notes),
        port=_port(facts.requested_port, notes),
        micro_batch_size=micro,
        accumulation_steps=train.global_batch_size // (micro * groups),
    )
    notes.problems.extend(
        f"environment.env.{name}={value}, but torchrun sets {name} for each worker; remove it."
        for name, value in settings.env.items()
        if name in SET_BY_TORCHRUN
    )
    refuse(notes.problems)
    variables = worker_environment(config, plan, facts)
    return plan.model_copy(
        update={
            "env": variables | settings.env,
            "reasons": notes.reasons,
            "findings": (*_warnings(config, plan, facts), *replaced_variables(variables, settings.env)),
            "patches": tuple(patch.name for patch in needed_patches(facts.versions)),
        }
    )


def _port(requested: PortCheck | None, notes: Notes) -> int | Literal["auto"]:
    if requested is None:
        return "auto"
    if not requested.free:
        notes.problems.append(
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
        found += _gpu_warnings(plan, facts)
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


def _gpu_warnings(plan: EnvironmentPlan, facts: MachineFacts) -> list[Finding]:
    found, unused = [], len(facts.gpus) - plan.nproc_per_node
    if unused > 0:
        found.append(finding("workers", plan.nproc_per_node, "note", f"{unused} GPU(s) stay unused."))
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
