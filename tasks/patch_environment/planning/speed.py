"""The settings that make a step faster: the configuration's own, checked; else what suits the machine."""

from infini_llama.configs.schema import PipelineConfig, TrainingConfig
from infini_llama.tasks.patch_environment.planning.choices import Choices
from infini_llama.tasks.patch_environment.planning.devices import Devices
from infini_llama.tasks.patch_environment.probe.attention_trial import TRIED_HEAD_SIZES
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import Compile, Device, PinnedSettings, Precision

# Bytes of fp32 logits of one micro-batch from which they are computed in parts. On a CPU a part is the largest power of two of
# tokens whose logits take so many bytes: the head's weights and gradient are read for each, so that smaller parts are slower, even
# such as a cache holds (benchmarks/loss.py). On a GPU it has so many tokens.
LARGE_LOGITS = {"cpu": 32 * 2**20, "cuda": 2**30}
CPU_CHUNK_BYTES, GPU_CHUNK = 128 * 2**20, 4096


def precision(
    config: PipelineConfig, devices: Devices, facts: MachineFacts, pinned: PinnedSettings | None, choices: Choices
) -> Precision:
    """bf16 where it is computed in hardware, else fp32."""
    without = [facts.gpus[number].name for number in devices.gpus if not facts.gpus[number].bf16]

    def rule() -> tuple[Precision, str]:
        if devices.gpus and not without:
            return "bf16", "every GPU used has bf16"
        if (
            devices.device == "cpu" and facts.cpu.bf16
        ):  # 1.8 times the speed of fp32 (benchmarks/results/environment.json)
            return "bf16", f"this processor multiplies bf16 ({'AMX' if facts.cpu.amx else 'vector units'})"
        return "fp32", "exact and available everywhere"

    def fault(precision: Precision) -> str:
        if precision == "bf16" and without:
            return f"environment.precision=bf16, but {', '.join(without)} has no bf16; use fp32 or auto."
        return ""

    return choices.choose("precision", config.environment.precision, pinned and pinned.precision, rule, fault)


def threads(
    config: PipelineConfig, devices: Devices, facts: MachineFacts, pinned: PinnedSettings | None, choices: Choices
) -> int:
    """The cores, divided between the workers."""

    def rule() -> tuple[int, str]:
        cores = facts.cores
        return max(1, cores // devices.processes), f"{cores} usable core(s) over {devices.processes} worker(s)"

    return choices.choose("threads", config.environment.threads, pinned and pinned.threads, rule)


def allocator(
    config: PipelineConfig, device: Device, facts: MachineFacts, pinned: PinnedSettings | None, choices: Choices
) -> str:
    """system, glibc, tcmalloc or jemalloc; only a CPU's memory comes from it.

    glibc that keeps freed memory is as fast as jemalloc, and 1.15 times as fast as the system's (benchmarks/results/environment.json).
    """

    def rule() -> tuple[str, str]:
        if device == "cpu" and facts.glibc:
            return "glibc", "glibc's, which keeps freed memory instead of returning it to the kernel"
        return "system", "training runs on a GPU" if device == "cuda" else "this system has no glibc"

    def fault(allocator: str) -> str:
        if allocator == "glibc" and not facts.glibc:
            return "environment.allocator=glibc, but this system has another C library; use auto or system."
        if allocator in ("system", "glibc") or allocator in facts.allocators:
            return ""
        have = f"only {', '.join(facts.allocators)}" if facts.allocators else "none"
        return (
            f"environment.allocator={allocator}, but of the libraries that can be preloaded there is {have} here; install it "
            "(apt install libtcmalloc-minimal4 or libjemalloc2) or use auto."
        )

    return choices.choose("allocator", config.environment.allocator, pinned and pinned.allocator, rule, fault)


def attention(
    config: PipelineConfig,
    devices: Devices,
    number: Precision,
    facts: MachineFacts,
    pinned: PinnedSettings | None,
    choices: Choices,
) -> str:
    """Flash attention if it works here, else sdpa.

    Args:
        number: the precision.
    """

    def rule() -> tuple[str, str]:
        if why_not := _without_flash(config, devices, number):
            return "sdpa", f"torch's scaled_dot_product_attention chooses the kernel; {why_not}"
        fault = facts.attention.get("flash2", "it was not tried")
        if not fault:
            return "flash2", "it can be imported, and agrees with torch's own attention in a trial"
        return "sdpa", f"torch's scaled_dot_product_attention chooses the kernel; flash2: {fault}"

    def fault(backend: str) -> str:
        key = f"environment.attention_backend={backend}"
        if backend == "flash2" and devices.device != "cuda":
            return f"{key}, but it needs a GPU and training runs on the CPU; use auto, sdpa or blocked."
        if backend == "flash2" and number == "fp32":
            return f"{key}, but it computes in half precision only; set environment.precision=bf16 or use sdpa."
        if error := facts.attention.get(backend):
            return f"{key}, but it cannot be used here: {error}; use auto or sdpa."
        if backend == "blocked" and config.model.attention_dropout:
            return f"{key}, but it does not support attention dropout; set model.attention_dropout=0 or use sdpa."
        return ""

    requested = config.environment.attention_backend
    return choices.choose("attention_backend", requested, pinned and pinned.attention_backend, rule, fault)


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


def compilation(
    train: TrainingConfig, device: Device, facts: MachineFacts, pinned: PinnedSettings | None, choices: Choices
) -> Compile:
    """block for GPUs that can, else off."""
    lacking = compile_fault(device, facts)

    def rule() -> tuple[Compile, str]:
        if device == "cpu":
            return "off", "it is off on a CPU"
        if train.parallel == "deepspeed":
            return "off", "it cannot be combined with train.parallel=deepspeed"
        if lacking:
            return "off", lacking
        return "block", "it makes the steps of a GPU faster, and is checked against eager execution"

    def fault(compile: Compile) -> str:
        return f"train.compile={compile}, but {lacking}; install it or use off." if compile != "off" and lacking else ""

    return choices.choose("compile", train.compile, pinned and pinned.compile, rule, fault)


def loss_chunk(
    config: PipelineConfig, device: Device, tokens: int, pinned: PinnedSettings | None, choices: Choices
) -> int:
    """Tokens of a micro-batch whose logits exist at a time; 0: all.

    Args:
        tokens: of a micro-batch.
    """
    vocab_size = config.data.tokenizer.vocab_size

    def rule() -> tuple[int, str]:
        chunk = chunk_of(device, tokens, vocab_size)
        size = f"{4 * tokens * vocab_size / 2**20:,.0f} MiB, {'many' if chunk else 'few'}"
        return chunk, f"the logits of a micro-batch are {size}"

    return choices.choose("loss_chunk", config.train.loss_chunk, pinned and pinned.loss_chunk, rule)


def chunk_of(device: Device, tokens: int, vocab_size: int) -> int:
    """What `auto` stands for in train.loss_chunk, for micro-batches of so many tokens."""
    if 4 * tokens * vocab_size <= LARGE_LOGITS[device]:
        return 0
    return GPU_CHUNK if device == "cuda" else 1 << ((CPU_CHUNK_BYTES // (4 * vocab_size)).bit_length() - 1)


def backend(config: PipelineConfig, device: Device, nccl: bool, choices: Choices) -> str:
    """nccl or gloo."""

    def rule() -> tuple[str, str]:
        if device == "cuda" and nccl:
            return "nccl", "GPUs"
        return "gloo", "CPU" if device == "cpu" else "torch has no NCCL"

    def fault(backend: str) -> str:
        if backend == "nccl" and not (device == "cuda" and nccl):
            return (
                "environment.distributed_backend=nccl, but it needs GPUs and a torch built with NCCL; use auto or gloo."
            )
        return ""

    return choices.choose("distributed_backend", config.environment.distributed_backend, None, rule, fault)
