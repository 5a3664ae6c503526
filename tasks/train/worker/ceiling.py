"""What this machine can compute at most, as matrix products alone show it: the denominator of MFU."""

import time

import torch

SIZE = {"cpu": 1024, "cuda": 8192}
SECONDS = 0.1


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of square matrix products in `dtype`: the best of those that fit into 0.1 s, after one.

    Measured rather than read from a data sheet, so that it exists for every processor and knows its threads, clock and neighbours.
    """
    size = SIZE[device.type]
    generator = torch.Generator(device).manual_seed(0)  # a training's own generators stay as they are
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    best, spent, product = float("inf"), 0.0, a @ b
    while spent < SECONDS:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        torch.mm(a, b, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        best, spent = min(best, seconds), spent + seconds
    return 2.0 * size**3 / best
