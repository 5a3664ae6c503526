"""Run in a child process: which functions compute softmax attention correctly here, and how fast."""

import json
import statistics
import time
from dataclasses import dataclass
from typing import TypedDict

ROUNDS = 5
TRIED_HEAD_SIZES = (64, 128)
# Of the reference's largest entry: what rounding explains (bf16 has 8 bits, and a gradient sums over a row).
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


@dataclass(frozen=True)
class AttentionCase:
    """Shapes of a run's attention. documents: rows hold several documents."""

    candidates: list[str]
    device: str
    precision: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    documents: bool = False


class AttentionResult(TypedDict, total=False):
    """seconds: median of forward and backward; difference: from exact attention; error: why the candidate is not usable."""

    seconds: float
    difference: float
    error: str


def try_attention(case: AttentionCase, rounds: int = ROUNDS) -> dict[str, AttentionResult]:
    """Run forward and backward by each candidate, compare with exact attention in fp32, then time it in `rounds`.

    Returns:
        the result of each candidate.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from infini_llama.model.backends import causal_attention

    device, dtype = case.device, torch.bfloat16 if case.precision == "bf16" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        shape = (case.batch, heads, case.length, case.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q, k, v, downstream = (random(heads) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads))
    documents = None
    if case.documents:
        documents = (torch.arange(case.length, device=device) // max(1, case.length // 3)).repeat(case.batch, 1)

    def once(backend: str, kind: torch.dtype) -> list[torch.Tensor]:
        inputs = [tensor.detach().clone().to(kind).requires_grad_() for tensor in (q, k, v)]
        output = causal_attention(inputs[0], inputs[1], inputs[2], documents, backend)
        output.backward(downstream.to(kind))
        if device == "cuda":
            torch.cuda.synchronize()
        return [output.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]

    with sdpa_kernel(SDPBackend.MATH):
        reference = once("sdpa", torch.float32)
    results: dict[str, AttentionResult] = {}
    for backend in case.candidates:
        try:
            found = once(backend, dtype)
            difference = max(
                ((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, reference, strict=True)
            )
            if not difference <= TOLERANCE[case.precision]:
                results[backend] = {"error": f"it differs from plain mathematics by {difference:.2g}"}
                continue
            times = []
            for _ in range(rounds):
                began = time.perf_counter()
                once(backend, dtype)
                times.append(time.perf_counter() - began)
            results[backend] = {"difference": difference}
            if times:
                results[backend]["seconds"] = statistics.median(times)
        except Exception as error:
            results[backend] = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    return results


def disagreement(backend: str, device: str, precision: str) -> str:
    """Why a backend cannot be used on this device, "" if it agrees with exact attention at TRIED_HEAD_SIZES, with and without documents."""
    for head_dim in TRIED_HEAD_SIZES:
        for documents in (False, True):
            case = AttentionCase([backend], device, precision, 2, 4, 2, 200, head_dim, documents)
            if error := try_attention(case, rounds=0)[backend].get("error"):
                return error
    return ""


def main(case: str) -> None:
    print("\n" + json.dumps(try_attention(AttentionCase(**json.loads(case)))))
