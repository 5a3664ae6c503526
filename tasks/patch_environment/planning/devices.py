"""Which device trains, which GPUs of the machine, and how many workers."""

from dataclasses import dataclass, field

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import EnvironmentConfig, PipelineConfig
from infini_llama.tasks.patch_environment.planning.findings_gpu import is_busy
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import Device


@dataclass(frozen=True)
class Devices:
    """gpus: their numbers, one per worker; empty on a CPU."""

    device: Device
    gpus: tuple[int, ...]
    processes: int


@dataclass(frozen=True)
class Notes:
    """What the choice of settings adds: why this machine cannot run the configuration, and why a setting has its value."""

    problems: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def explain(self, setting: str, reason: str) -> None:
        """Record why a setting has its value."""
        self.reasons[setting] = reason


def choose_devices(config: PipelineConfig, facts: MachineFacts, micro: int, notes: Notes) -> Devices:
    """What the configuration sets, else what is free; each setting that is impossible here adds to the problems.

    Args:
        micro: sequences per forward pass of one worker.
    """
    settings, sequences, together = config.environment, config.train.global_batch_size, config.train.context_parallel
    nodes = settings.nnodes
    device = _device(settings, facts, notes)
    usable = _usable(settings, device, facts, notes)
    if settings.nproc_per_node == "auto" and device == "cuda" and usable:
        most = len(usable) // together * together
        fitting = (n for n in range(most, 0, -together) if sequences % (micro * n * nodes // together) == 0)
        count = next(fitting, together)
        divided = (
            f"of {len(usable)} GPUs, as many as share train.global_batch_size={sequences} "
            f"in parts of train.micro_batch_size={micro}"
        )
        notes.explain("nproc_per_node", divided if count < len(usable) else "one worker per GPU")
    elif settings.nproc_per_node == "auto":
        count, why = _on_cpu(config)
        notes.explain("nproc_per_node", why)
    else:
        count = settings.nproc_per_node
        usable = usable if count <= len(usable) or settings.gpus != "auto" else _all(facts)
        if device == "cuda" and usable and count > len(usable):
            named = f"environment.gpus names {len(usable)}"
            there = named if settings.gpus != "auto" else f"there are {len(usable)} GPU(s)"
            notes.problems.append(
                f"environment.nproc_per_node={count}, but {there} and each takes one worker; "
                f"use auto or at most {len(usable)}."
            )
    if count % together:
        notes.problems.append(
            f"train.context_parallel={together}, but {count} worker(s) cannot be divided into groups of {together}; "
            "change one of them."
        )
    elif sequences % (micro * count * nodes // together):
        shared = "" if together == 1 else f" / {together} that share each sequence"
        notes.problems.append(
            f"train.global_batch_size={sequences} is not a multiple of train.micro_batch_size={micro} "
            f"x {count} worker(s){f' x {nodes} nodes' if nodes > 1 else ''}{shared}; change one of them."
        )
    return Devices(device, tuple(sorted(usable[:count])) if device == "cuda" else (), count)


def _device(settings: EnvironmentConfig, facts: MachineFacts, notes: Notes) -> Device:
    if settings.device == "auto":
        found = f"{len(facts.gpus)} GPU(s) found" if facts.gpus else facts.gpu_fault or "no GPU found"
        notes.explain("device", found)
        return "cuda" if facts.gpus else "cpu"
    if settings.device == "cuda" and not facts.gpus:
        fault = facts.gpu_fault
        why = f"torch cannot use the GPU here ({fault})" if fault else "no GPU is available on this machine"
        notes.problems.append(f"environment.device=cuda, but {why}; use auto or cpu, or repair the driver.")
    return settings.device


def _all(facts: MachineFacts) -> list[int]:
    """All GPUs, free ones first."""
    return sorted(range(len(facts.gpus)), key=lambda number: is_busy(facts.gpus[number]))


def _usable(settings: EnvironmentConfig, device: Device, facts: MachineFacts, notes: Notes) -> list[int]:
    there = len(facts.gpus)
    if settings.gpus != "auto":
        for number in [number for number in settings.gpus if number >= there]:
            have = f"there are {there}, 0 to {there - 1}" if there else "no GPU is available on this machine"
            notes.problems.append(f"environment.gpus names GPU {number}, but {have}; use auto, or numbers of those.")
        if device == "cpu":
            notes.problems.append(
                f"environment.gpus={settings.gpus}, but training runs on the CPU; set environment.gpus=auto."
            )
        return sorted({number for number in settings.gpus if number < there})
    if device == "cpu":
        return []
    free = [number for number, gpu in enumerate(facts.gpus) if not is_busy(gpu)]
    if free and len(free) < there:
        busy = ", ".join(str(number) for number in range(there) if number not in free)
        notes.explain("gpus", f"GPU {busy} is in use by other processes")
    return free or list(range(there))


def _on_cpu(config: PipelineConfig) -> tuple[int, str]:
    """One worker with all threads, or as many workers as share each sequence."""
    together = config.train.context_parallel
    return together, "as many workers as share each sequence" if together > 1 else "one worker with all threads"


def refuse(problems: list[str]) -> None:
    """Raise ConfigError with one line per problem, if there is any."""
    if problems:
        raise ConfigError(
            "this machine cannot run the configuration:\n" + "\n".join(f"  {problem}" for problem in problems)
        )
