"""What the parts share: cases, models by size, one rank without torchrun, and timing."""

import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from infini_llama.model.config import LlamaConfig
    from infini_llama.tasks.train.worker.strategies.ranks import Ranks

Row = dict[str, Any]  # a line of the table: a word, a number or None per column


class Case(NamedTuple):
    """A function of ("cuda" or "cpu", whether it is a rehearsal), and the seconds that it is expected to take on a GPU."""

    function: Callable[[str, bool], list[Row]]
    seconds: float


# hidden, intermediate, layers, heads, key-value heads of configs/small, large and xl; tokens of a micro-batch on 80 GB.
SHAPES = {
    "125M": (768, 2048, 12, 12, 12),
    "800M": (1536, 5120, 24, 16, 8),
    "1.5B": (2048, 5632, 32, 32, 8),
}
TOKENS = {"125M": 32768, "800M": 16384, "1.5B": 8192}
VOCABULARY = 50304
# Dense bf16 operations per second that the vendor states, by a part of the name that torch reports.
VENDOR_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


def model_config(
    size: str, length: int, rehearse: bool, **fields: Any
) -> "LlamaConfig":
    """The architecture of a size; a rehearsal's is tiny."""
    from infini_llama.model.config import LlamaConfig

    shape = (64, 128, 2, 4, 2) if rehearse else SHAPES[size]
    config = LlamaConfig(512 if rehearse else VOCABULARY, *shape, length)
    return replace(config, **fields)


def tokens_of(size: str, length: int, rehearse: bool) -> tuple[int, int]:
    """(sequences of a micro-batch, tokens of each)."""
    return (2, 64) if rehearse else (max(1, TOKENS[size] // length), length)


def one_rank(device: str) -> "Ranks":
    """The only rank of a world, with a process group as a worker has."""
    import torch.distributed as dist

    from infini_llama.tasks.train.worker.strategies.ranks import Ranks

    if dist.is_initialized():
        dist.destroy_process_group()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return Ranks(device, "nccl" if device == "cuda" else "gloo")


def half(device: str) -> "torch.dtype":
    """What steps compute in: bf16 on a GPU; fp32 in a rehearsal, as most CPUs only emulate the other."""
    import torch

    return torch.bfloat16 if device == "cuda" else torch.float32


def precision(device: str) -> Literal["bf16", "fp32"]:
    return "bf16" if device == "cuda" else "fp32"


def wait_for(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(
    function: Callable[[], Any], device: str, rounds: int = 5, warm_up: int = 2
) -> float:
    """Median seconds of a call, the device waited for."""
    times = []
    for number in range(warm_up + rounds):
        wait_for(device)
        began = time.perf_counter()
        function()
        wait_for(device)
        if number >= warm_up:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def peak_bytes(device: str) -> int:
    """Most bytes in use so far: of torch's allocator on a GPU, resident on a CPU."""
    from infini_llama.tasks.train.worker.callbacks.profiler import memory_peak

    wait_for(device)
    return memory_peak()


def copy_bandwidth(device: str, rehearse: bool) -> float:
    """Bytes per second of a copy within the device's memory, read and written."""
    import torch

    source = torch.empty(2**20 if rehearse else 2**32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), device)


def relative_difference(found: "torch.Tensor", expected: "torch.Tensor") -> float:
    """2-norm of the difference over that of `expected`, on the CPU in fp64."""
    exact = expected.detach().double().cpu()
    return float(
        (found.detach().double().cpu() - exact).norm() / exact.norm().clamp_min(1e-30)
    )
