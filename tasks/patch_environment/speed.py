"""The settings that make a step faster: the configuration's own, checked; else, under environment.tune, what suits the machine."""

from typing import Any

from infini_llama.tasks.patch_environment.devices import Devices

HALF_ONLY = ("varlen", "flash2", "flash4")
# Bytes of fp32 logits of one micro-batch from which they are computed in parts, and the tokens of one; measured in benchmarks/loss.py.
LARGE_LOGITS = {"cpu": 32 * 2**20, "cuda": 2**30}
CHUNK = {"cpu": 256, "cuda": 4096}


def precision(wishes: dict, devices: Devices, facts: dict, problems: list[str], reasons: dict[str, str]) -> str:
    """fp32 or bf16."""
    wish = wishes["precision"]
    without = [facts["gpus"][number]["name"] for number in devices.gpus if not facts["gpus"][number]["bf16"]]
    if wish != "auto":
        if wish == "bf16" and without:
            problems.append(f"environment.precision=bf16, but {', '.join(without)} has no bf16; use fp32 or auto.")
        return wish
    if devices.gpus and not without:
        reasons["precision"] = "every GPU used has bf16"
        return "bf16"
    if devices.kind == "cpu" and wishes["tune"] != "off" and facts["cpu"]["bf16"]:
        reasons["precision"] = f"this processor computes in bf16 ({'AMX' if facts['cpu']['amx'] else 'vector units'})"
        return "bf16"
    reasons["precision"] = "exact and available everywhere"
    return "fp32"


def allocator(wishes: dict, kind: str, facts: dict, problems: list[str], reasons: dict[str, str]) -> str:
    """system, tcmalloc or jemalloc; only a CPU's memory comes from it."""
    wish, there = wishes["allocator"], facts["allocators"]
    if wish not in ("auto", "system") and wish not in there:
        have = f"only {', '.join(there)}" if there else "none"
        problems.append(
            f"environment.allocator={wish}, but of the libraries that can be preloaded there is {have} here; install it "
            "(apt install libtcmalloc-minimal4 or libjemalloc2) or use auto."
        )
    if wish != "auto":
        return wish
    if kind == "cpu" and wishes["tune"] != "off":
        chosen = next((name for name in ("tcmalloc", "jemalloc") if name in there), "system")
        reasons["allocator"] = (
            "it is installed, and gives freed memory out again" if chosen != "system" else "no other is installed"
        )
        return chosen
    reasons["allocator"] = "it is not the CPU that computes" if kind == "cuda" else "environment.tune is off"
    return "system"


def attention(config: dict, devices: Devices, number: str, facts: dict, problems: list[str]) -> str:
    """The configuration's attention backend, checked; sdpa where it leaves that open.

    Args:
        number: the precision.
    """
    wish = config["environment"]["attention_backend"]
    key = f"environment.attention_backend={wish}"
    if wish in HALF_ONLY and devices.kind != "cuda":
        problems.append(f"{key}, but it needs a GPU and training runs on the CPU; use auto, sdpa or blocked.")
    elif wish in HALF_ONLY and number == "fp32":
        problems.append(f"{key}, but it computes in half precision only; set environment.precision=bf16 or use sdpa.")
    elif error := facts["attention"].get(wish):
        problems.append(f"{key}, but it cannot be used here: {error}; use auto or sdpa.")
    dropout = config["model"].get("attention_dropout") or 0.0
    if wish not in ("auto", "sdpa", "flash2") and dropout:
        problems.append(f"{key}, but it cannot drop weights; set model.attention_dropout=0 or use sdpa.")
    return "sdpa" if wish == "auto" else wish


def can_compile(kind: str, facts: dict) -> str:
    """Why torch.compile cannot work here, "" where it can."""
    if kind == "cpu":
        return "" if facts["compilers"]["cxx"] else "no C++ compiler is installed (for example apt install g++)"
    if not facts["compilers"]["cc"]:
        return "no C compiler is installed (for example apt install gcc)"
    return "" if "triton" in facts["versions"] else "triton is not installed (pip install triton)"


def compilation(train: dict, kind: str, facts: dict, problems: list[str]) -> str:
    """The configuration's train.compile, checked; off where it leaves that open."""
    wish, fault = train["compile"], can_compile(kind, facts)
    if wish in ("block", "whole") and fault:
        problems.append(f"train.compile={wish}, but {fault}; install it or use off.")
    return "off" if wish == "auto" else wish


def loss_chunk(wish: int | str, kind: str, tokens: int, vocab_size: int, reasons: dict[str, str] | None = None) -> int:
    """train.loss_chunk: tokens of a micro-batch whose logits exist at a time; 0: all."""
    if wish != "auto":
        return int(wish)
    logits = 4 * tokens * vocab_size
    large = logits > LARGE_LOGITS[kind]
    if reasons is not None:
        reasons["loss_chunk"] = (
            f"the logits of a micro-batch are {logits / 2**20:,.0f} MiB, {'many' if large else 'few'}"
        )
    return CHUNK[kind] if large else 0


def backend(wish: str, kind: str, nccl: bool, problems: list[str], reasons: dict[str, str]) -> str:
    """nccl or gloo."""
    if wish == "auto":
        chosen = "nccl" if kind == "cuda" and nccl else "gloo"
        reasons["distributed_backend"] = "GPUs" if chosen == "nccl" else "CPU" if kind == "cpu" else "torch has no NCCL"
        return chosen
    if wish == "nccl" and not (kind == "cuda" and nccl):
        problems.append(
            "environment.distributed_backend=nccl, but it needs GPUs and a torch built with NCCL; use auto or gloo."
        )
    return wish


def port(wished: dict[str, Any] | None, problems: list[str]) -> int | str:
    """auto, or the port that the configuration fixes and that was found free."""
    if wished is None:
        return "auto"
    if not wished["free"]:
        problems.append(
            f"environment.port={wished['port']}, but another program listens there; end it, choose another port or use auto."
        )
    return wished["port"]
