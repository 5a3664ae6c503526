"""Which device trains, which GPUs of the machine, and how many workers."""

from dataclasses import dataclass

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.patch_environment.findings_gpu import is_busy


@dataclass(frozen=True)
class Devices:
    """kind: cpu or cuda; gpus: their numbers, one a worker, [] on a CPU."""

    kind: str
    gpus: list[int]
    processes: int


def choose_devices(config: dict, facts: dict, micro: int, problems: list[str], reasons: dict[str, str]) -> Devices:
    """What the configuration asks for, else what is free; each wish that cannot be met becomes a line of `problems`.

    Args:
        micro: sequences of one forward pass of one worker.
    """
    wishes, train = config["environment"], config["train"]
    nodes, sequences, together = wishes["nnodes"], train["global_batch_size"], train["context_parallel"]
    kind = _kind(wishes["device"], facts, problems, reasons)
    usable = _usable(wishes, kind, facts, problems, reasons)
    wish = wishes["nproc_per_node"]
    if wish == "auto" and kind == "cuda" and usable:
        most = len(usable) // together * together
        fitting = (n for n in range(most, 0, -together) if sequences % (micro * n * nodes // together) == 0)
        count = next(fitting, together)
        reasons["nproc_per_node"] = "one worker a GPU"
        if count < len(usable):
            reasons["nproc_per_node"] = (
                f"of {len(usable)} GPUs, as many as share train.global_batch_size={sequences} "
                f"in parts of train.micro_batch_size={micro}"
            )
    elif wish == "auto":
        count, reasons["nproc_per_node"] = _on_cpu(config, facts, micro)
    else:
        count = int(wish)
        usable = usable if count <= len(usable) or wishes["gpus"] != "auto" else _all(facts)
        if kind == "cuda" and usable and count > len(usable):
            there = (
                f"environment.gpus names {len(usable)}"
                if wishes["gpus"] != "auto"
                else f"there are {len(usable)} GPU(s)"
            )
            problems.append(
                f"environment.nproc_per_node={count}, but {there} and each takes one worker; "
                f"use auto or at most {len(usable)}."
            )
    if count % together:
        problems.append(
            f"train.context_parallel={together}, but {count} worker(s) are no whole groups of {together}; change one of them."
        )
    elif sequences % (micro * count * nodes // together):
        shared = "" if together == 1 else f" / {together} that share each sequence"
        problems.append(
            f"train.global_batch_size={sequences} is not a multiple of train.micro_batch_size={micro} "
            f"x {count} worker(s){f' x {nodes} nodes' if nodes > 1 else ''}{shared}; change one of them."
        )
    return Devices(kind, sorted(usable[:count]) if kind == "cuda" else [], count)


def _kind(wish: str, facts: dict, problems: list[str], reasons: dict[str, str]) -> str:
    fault = facts.get("gpu_fault")
    if wish == "auto":
        reasons["device"] = f"{len(facts['gpus'])} GPU(s) found" if facts["gpus"] else fault or "no GPU found"
        return "cuda" if facts["gpus"] else "cpu"
    if wish == "cuda" and not facts["gpus"]:
        why = f"torch cannot use the GPU here ({fault})" if fault else "no GPU answers on this machine"
        problems.append(f"environment.device=cuda, but {why}; use auto or cpu, or mend the driver.")
    return wish


def _all(facts: dict) -> list[int]:
    """All GPUs, free ones first."""
    return sorted(range(len(facts["gpus"])), key=lambda number: is_busy(facts["gpus"][number]))


def _usable(wishes: dict, kind: str, facts: dict, problems: list[str], reasons: dict[str, str]) -> list[int]:
    wish, there = wishes["gpus"], len(facts["gpus"])
    if wish != "auto":
        for number in [number for number in wish if number >= there]:
            have = f"there are {there}, 0 to {there - 1}" if there else "no GPU answers on this machine"
            problems.append(f"environment.gpus names GPU {number}, but {have}; use auto, or numbers of those.")
        if kind == "cpu":
            problems.append(f"environment.gpus={wish}, but training runs on the CPU; set environment.gpus=auto.")
        return sorted({number for number in wish if number < there})
    if kind == "cpu":
        return []
    free = [number for number in range(there) if not is_busy(facts["gpus"][number])]
    if free and len(free) < there:
        busy = ", ".join(str(number) for number in range(there) if number not in free)
        reasons["gpus"] = f"GPU {busy} is in use by others"
    return free or list(range(there))


def _on_cpu(config: dict, facts: dict, micro: int) -> tuple[int, str]:
    """One worker with all threads; under environment.tune and where others want the cores too, one worker a core."""
    cores, sequences = facts["cores"], config["train"]["global_batch_size"]
    if (together := config["train"]["context_parallel"]) > 1:
        return together, "as many workers as share each sequence"
    if config["environment"]["tune"] == "off" or facts["load"] < cores or config["environment"]["threads"] != "auto":
        return 1, "one worker with all the threads"
    by_memory = max(1, int(facts["memory"]["available"] // (2 * 1024**3)))
    count = next(
        (
            n
            for n in range(min(cores, by_memory), 0, -1)
            if sequences % (micro * n * config["environment"]["nnodes"]) == 0
        ),
        1,
    )
    if count == 1:
        return 1, "one worker: the global batch or the memory cannot be shared"
    return (
        count,
        f"others want the {cores} cores too (load {facts['load']:.1f}): workers wait for each other less than threads",
    )


def refuse(problems: list[str]) -> None:
    """Raises ConfigError with a line for each problem, if there is any."""
    if problems:
        raise ConfigError(
            "this machine cannot run the configuration:\n" + "\n".join(f"  {problem}" for problem in problems)
        )
