"""The settings that make a step faster: the configuration's own, checked; else what suits the machine."""

from infini_llama.configs.schema import PipelineConfig, TrainingConfig
from infini_llama.tasks.patch_environment.planning.devices import Devices, Notes
from infini_llama.tasks.patch_environment.probe.attention_trial import TRIED_HEAD_SIZES
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import Compile, Device, Precision

HALF_ONLY = ("varlen", "flash2")
# In the order in which `auto` takes them. torch's own attention includes a flash kernel, but not for several documents in a sequence.
FLASH = ("flash2",)
FLASH_OF_DOCUMENTS = ("flash2", "varlen")
# Bytes of fp32 logits of one micro-batch from which they are computed in parts. On a CPU a part is the largest power of two of
# tokens whose logits take so many bytes: the head's weights and gradient are read for each, so that smaller parts are slower, even
# such as a cache holds (benchmarks/loss.py). On a GPU it has so many tokens.
LARGE_LOGITS = {"cpu": 32 * 2**20, "cuda": 2**30}
CPU_CHUNK_BYTES, GPU_CHUNK = 128 * 2**20, 4096


def precision(config: PipelineConfig, devices: Devices, facts: MachineFacts, notes: Notes) -> Precision:
    """The configuration's precision, checked; else bf16 where it is computed in hardware."""
    requested = config.environment.precision
    without = [facts.gpus[number].name for number in devices.gpus if not facts.gpus[number].bf16]
    if requested != "auto":
        if requested == "bf16" and without:
            notes.problems.append(
                f"environment.precision=bf16, but {', '.join(without)} has no bf16; use fp32 or auto."
            )
        return requested
    if devices.gpus and not without:
        notes.explain("precision", "every GPU used has bf16")
        return "bf16"
    if devices.device == "cpu" and facts.cpu.bf16:  # 1.8 times the speed of fp32 (benchmarks/results/environment.json)
        notes.explain("precision", f"this processor multiplies bf16 ({'AMX' if facts.cpu.amx else 'vector units'})")
        return "bf16"
    notes.explain("precision", "exact and available everywhere")
    return "fp32"


def allocator(config: PipelineConfig, device: Device, facts: MachineFacts, notes: Notes) -> str:
    """system, glibc, tcmalloc or jemalloc; only a CPU's memory comes from it.

    glibc that keeps freed memory is as fast as jemalloc, and 1.15 times as fast as the system's (benchmarks/results/environment.json).
    """
    requested = config.environment.allocator
    if requested == "glibc" and not facts.glibc:
        notes.problems.append("environment.allocator=glibc, but this system has another C library; use auto or system.")
    if requested not in ("auto", "system", "glibc") and requested not in facts.allocators:
        have = f"only {', '.join(facts.allocators)}" if facts.allocators else "none"
        notes.problems.append(
            f"environment.allocator={requested}, but of the libraries that can be preloaded there is {have} here; install it "
            "(apt install libtcmalloc-minimal4 or libjemalloc2) or use auto."
        )
    if requested != "auto":
        return requested
    if device == "cpu" and facts.glibc:
        notes.explain("allocator", "glibc's, which keeps freed memory instead of returning it to the kernel")
        return "glibc"
    notes.explain("allocator", "training runs on a GPU" if device == "cuda" else "this system has no glibc")
    return "system"


def attention(config: PipelineConfig, devices: Devices, number: Precision, facts: MachineFacts, notes: Notes) -> str:
    """The configuration's attention backend, checked; where it leaves that open, flash attention if it works here, else sdpa.

    Args:
        number: the precision.
    """
    requested = config.environment.attention_backend
    key = f"environment.attention_backend={requested}"
    if requested in HALF_ONLY and devices.device != "cuda":
        notes.problems.append(f"{key}, but it needs a GPU and training runs on the CPU; use auto, sdpa or blocked.")
    elif requested in HALF_ONLY and number == "fp32":
        notes.problems.append(
            f"{key}, but it computes in half precision only; set environment.precision=bf16 or use sdpa."
        )
    elif error := facts.attention.get(requested):
        notes.problems.append(f"{key}, but it cannot be used here: {error}; use auto or sdpa.")
    if requested not in ("auto", "sdpa", "flash2") and config.model.attention_dropout:
        notes.problems.append(
            f"{key}, but it does not support attention dropout; set model.attention_dropout=0 or use sdpa."
        )
    if requested != "auto":
        return requested
    if fault := _without_flash(config, devices, number):
        notes.explain("attention_backend", f"torch's scaled_dot_product_attention chooses the kernel; {fault}")
        return "sdpa"
    candidates = FLASH_OF_DOCUMENTS if config.train.document_masking else FLASH
    candidates = ("flash2",) if config.model.attention_dropout else candidates
    chosen = next((name for name in candidates if facts.attention.get(name) == ""), None)
    if chosen is None:
        faults = (
            f"{name} was not tried" if (fault := facts.attention.get(name)) is None else f"{name}: {fault}"
            for name in candidates
        )
        notes.explain(
            "attention_backend",
            f"torch's scaled_dot_product_attention chooses the kernel; {'; '.join(faults)}",
        )
        return "sdpa"
    notes.explain("attention_backend", "it can be imported, and agrees with torch's own attention in a trial")
    return chosen


def _without_flash(config: PipelineConfig, devices: Devices, number: Precision) -> str:
    """Why `auto` does not look for flash attention; "" where it does."""
    if devices.device == "cpu":
        return "flash attention needs a GPU"
    if number != "bf16":
        return f"flash attention is tried in bf16 only, and this run's precision is {number}"
    size = config.model.head_dim or config.model.hidden_size // config.model.num_attention_heads
    return "" if size in TRIED_HEAD_SIZES else f"flash attention is not tried at a head size of {size}"


def compile_fault(device: Device, facts: MachineFacts) -> str:
    """Why torch.compile cannot work here; "" where it can."""
    if device == "cpu":
        return "" if facts.compilers.cxx else "no C++ compiler is installed (for example apt install g++)"
    if not facts.compilers.cc:
        return "no C compiler is installed (for example apt install gcc)"
    return "" if "triton" in facts.versions else "triton is not installed (pip install triton)"


def compilation(train: TrainingConfig, device: Device, facts: MachineFacts, notes: Notes) -> Compile:
    """The configuration's train.compile, checked; where it leaves that open, block for GPUs that can."""
    fault = compile_fault(device, facts)
    if train.compile in ("block", "whole") and fault:
        notes.problems.append(f"train.compile={train.compile}, but {fault}; install it or use off.")
    if train.compile != "auto":
        return train.compile
    if train.parallel == "deepspeed":
        fault = "it cannot be combined with train.parallel=deepspeed"
    if device == "cpu":
        fault = "it is off on a CPU"
    notes.explain("compile", fault or "it makes the steps of a GPU faster, and is checked against eager execution")
    return "off" if fault else "block"


def loss_chunk(requested: int | str, device: Device, tokens: int, vocab_size: int, notes: Notes | None = None) -> int:
    """train.loss_chunk: tokens of a micro-batch whose logits exist at a time; 0: all."""
    if requested != "auto":
        return int(requested)
    logits = 4 * tokens * vocab_size
    large = logits > LARGE_LOGITS[device]
    if notes is not None:
        size = f"{logits / 2**20:,.0f} MiB, {'many' if large else 'few'}"
        notes.explain("loss_chunk", f"the logits of a micro-batch are {size}")
    if not large:
        return 0
    return GPU_CHUNK if device == "cuda" else 1 << ((CPU_CHUNK_BYTES // (4 * vocab_size)).bit_length() - 1)


def backend(config: PipelineConfig, device: Device, nccl: bool, notes: Notes) -> str:
    """nccl or gloo."""
    requested = config.environment.distributed_backend
    if requested == "auto":
        chosen = "nccl" if device == "cuda" and nccl else "gloo"
        why = "GPUs" if chosen == "nccl" else "CPU" if device == "cpu" else "torch has no NCCL"
        notes.explain("distributed_backend", why)
        return chosen
    if requested == "nccl" and not (device == "cuda" and nccl):
        notes.problems.append(
            "environment.distributed_backend=nccl, but it needs GPUs and a torch built with NCCL; use auto or gloo."
        )
    return requested
