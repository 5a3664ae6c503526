"""The measured peak of a processor, the denominator of MFU."""

import time

import torch

SIZE = {"cpu": 1024, "cuda": 8192}
SECONDS = 0.1


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of square matrix products in `dtype`.

    The best of 0.1 s, the denominator of MFU. Measured rather than read from a data sheet, so that
    it exists for every processor and reflects its threads, clock and other load.
    """
    size = SIZE[device.type]
    # Leaves the generators of the training alone.
    generator = torch.Generator(device).manual_seed(0)
    # [size, size] each
    a = torch.randn(size, size, device=device, generator=generator).to(dtype)
    b = torch.randn(size, size, device=device, generator=generator).to(dtype)
    product = a @ b
    best = float("inf")
    spent = 0.0
    while spent < SECONDS:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        torch.mm(a, b, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        best = min(best, seconds)
        spent += seconds
    return 2.0 * size**3 / best


def utilization(flops: float, peak: float) -> float | None:
    """Share of the measured peak.

    None above 1, where other programs slowed down the measurement of the peak.
    """
    return flops / peak if flops <= peak else None
