"""Which device trains, which GPUs of the machine, and how many workers."""

from dataclasses import dataclass

from infini_llama.configs.schema import EnvironmentConfig, PipelineConfig
from infini_llama.tasks.patch_environment.planning.choices import Choices
from infini_llama.tasks.patch_environment.planning.findings import is_busy
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import Device, PinnedSettings


@dataclass(frozen=True)
class Devices:
    """gpus: their numbers, one per worker; empty on a CPU."""

    device: Device
    gpus: tuple[int, ...]
    processes: int


def choose_device(
    settings: EnvironmentConfig, facts: MachineFacts, pinned: PinnedSettings | None, choices: Choices
) -> Device:
    """cpu or cuda."""

    def rule() -> tuple[Device, str]:
        found = f"{len(facts.gpus)} GPU(s) found" if facts.gpus else facts.gpu_fault or "no GPU found"
        return ("cuda" if facts.gpus else "cpu"), found

    def fault(device: Device) -> str:
        if device == "cpu" or facts.gpus:
            return ""
        why = (
            f"torch cannot use the GPU here ({facts.gpu_fault})"
            if facts.gpu_fault
            else "no GPU is available on this machine"
        )
        return f"environment.device=cuda, but {why}; use auto or cpu, or repair the driver."

    return choices.choose("device", settings.device, pinned and pinned.device, rule, fault)


def choose_workers(
    config: PipelineConfig,
    device: Device,
    facts: MachineFacts,
    pinned: PinnedSettings | None,
    choices: Choices,
) -> Devices:
    """The GPUs and the number of workers."""
    settings, sequences, together = config.environment, config.train.global_batch_size, config.train.context_parallel
    micro = 1 if config.train.micro_batch_size == "auto" else config.train.micro_batch_size
    usable = _usable(settings, device, facts, choices)

    def rule() -> tuple[int, str]:
        if device == "cpu" or not usable:
            return together, "as many workers as share each sequence" if together > 1 else "one worker with all threads"
        most = len(usable) // together * together
        fitting = (n for n in range(most, 0, -together) if not indivisible(config, micro, n))
        count = next(fitting, together)
        if count == len(usable):
            return count, "one worker per GPU"
        return count, (
            f"of {len(usable)} GPUs, as many as share train.global_batch_size={sequences} "
            f"in parts of train.micro_batch_size={micro}"
        )

    def fault(count: int) -> str:
        there = len(usable) if settings.gpus != "auto" else len(facts.gpus)
        if device == "cuda" and usable and count > there:
            named = f"environment.gpus names {there}" if settings.gpus != "auto" else f"there are {there} GPU(s)"
            return f"environment.nproc_per_node={count}, but {named} and each takes one worker; use auto or at most {there}."
        if count % together:
            return (
                f"train.context_parallel={together}, but {count} worker(s) cannot be divided into groups of {together}; "
                "change one of them."
            )
        return indivisible(config, micro, count)

    count = choices.choose("nproc_per_node", settings.nproc_per_node, pinned and pinned.nproc_per_node, rule, fault)
    if settings.gpus == "auto" and count > len(usable):  # also those that are busy, the free ones first
        usable = sorted(range(len(facts.gpus)), key=lambda number: is_busy(facts.gpus[number]))
    return Devices(device, tuple(sorted(usable[:count])) if device == "cuda" else (), count)


def indivisible(config: PipelineConfig, micro: int, count: int) -> str:
    """Why the global batch cannot be divided into micro-batches of `count` workers per node; "" where it can."""
    sequences, together, nodes = (
        config.train.global_batch_size,
        config.train.context_parallel,
        config.environment.nnodes,
    )
    if sequences % (micro * count * nodes // together) == 0:
        return ""
    shared = "" if together == 1 else f" / {together} that share each sequence"
    return (
        f"train.global_batch_size={sequences} is not a multiple of train.micro_batch_size={micro} "
        f"x {count} worker(s){f' x {nodes} nodes' if nodes > 1 else ''}{shared}; change one of them."
    )


def _usable(settings: EnvironmentConfig, device: Device, facts: MachineFacts, choices: Choices) -> list[int]:
    """Numbers of the GPUs that the configuration names, else of those that are free, else of all."""
    there = len(facts.gpus)
    if settings.gpus != "auto":
        for number in [number for number in settings.gpus if number >= there]:
            have = f"there are {there}, 0 to {there - 1}" if there else "no GPU is available on this machine"
            choices.refuse(f"environment.gpus names GPU {number}, but {have}; use auto, or numbers of those.")
        if device == "cpu":
            choices.refuse(
                f"environment.gpus={settings.gpus}, but training runs on the CPU; set environment.gpus=auto."
            )
        return sorted({number for number in settings.gpus if number < there})
    if device == "cpu":
        return []
    free = [number for number, gpu in enumerate(facts.gpus) if not is_busy(gpu)]
    if free and len(free) < there:
        busy = ", ".join(str(number) for number in range(there) if number not in free)
        choices.reasons["gpus"] = f"GPU {busy} is in use by other processes"
    return free or list(range(there))
