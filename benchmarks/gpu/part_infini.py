"""Infini-attention: cost and memory per token by length, against attention over the whole sequence."""

from dataclasses import replace
from functools import partial

import torch
from case import Case, Row, model_config, peak_bytes, seconds_of

from infini_llama.model.attention import Attention
from infini_llama.model.infini_attention import InfiniAttention
from infini_llama.model.layout import rows, segments
from infini_llama.model.llama import Llama
from infini_llama.model.memory import Product
from infini_llama.model.memory import scan as affine_scan

SEGMENT = 2048
LENGTHS = (4096, 8192, 32768, 131072)


def operation(kind: str, length: int, device: str, rehearse: bool) -> tuple[float, int]:
    """Seconds of forward and backward of one layer's attention of the 1.5B model, and bytes above the start."""
    segment = 16 if rehearse else SEGMENT
    config = replace(
        model_config("1.5B", length, rehearse), attention=kind, segment_length=segment
    )
    torch.manual_seed(0)
    layer = (Attention if kind == "softmax" else InfiniAttention)(config).to(device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, length, config.hidden_size, device=device, requires_grad=True)
    layout = (rows if kind == "softmax" else segments)(config, x.shape[:2], None, x)

    def once() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            output = layer(x, layout)
        output.sum().backward()

    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(once, device, rounds=2 if rehearse else 8)
    return seconds, peak_bytes(device) - before


def attention(device: str, rehearse: bool) -> list[Row]:
    """The attention operation by length: Infini-attention against softmax over the whole sequence."""
    found: list[Row] = []
    for length in (32, 64) if rehearse else LENGTHS:
        infini, memory = operation("infini", length, device, rehearse)
        softmax, whole = operation("softmax", length, device, rehearse)
        row: Row = {
            "length": length,
            "infini ns/token": 1e9 * infini / length,
            "softmax ns/token": 1e9 * softmax / length,
        }
        row |= {
            "softmax / infini": softmax / infini,
            "infini bytes/token": memory / length,
        }
        found.append(row | {"softmax bytes/token": whole / length})
    return [
        row
        | {"against the first": row["infini ns/token"] / found[0]["infini ns/token"]}
        for row in found
    ]


def model(kind: str, device: str, rehearse: bool) -> list[Row]:
    """Forward and backward of the 125M model, per token, at 4k and 32k."""
    found: list[Row] = []
    for length in (32, 64) if rehearse else (4096, 32768):
        config = replace(
            model_config("125M", length, rehearse),
            attention=kind,
            segment_length=16 if rehearse else SEGMENT,
        )
        torch.manual_seed(0)
        llama = Llama(config).to(device)
        llama.loss_chunk = 4096
        tokens = torch.randint(config.vocab_size, (1, length + 1), device=device)

        def once(llama: Llama = llama, tokens: torch.Tensor = tokens) -> None:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                total, _ = llama.loss(tokens[:, :-1], tokens[:, 1:])
            total.backward()

        found.append(
            {
                "attention": kind,
                "length": length,
                "ns/token": 1e9 * seconds_of(once, device) / length,
            }
        )
    return [
        row | {"against the first": row["ns/token"] / found[0]["ns/token"]}
        for row in found
    ]


def scan(device: str, rehearse: bool) -> list[Row]:
    """The memory's recurrence over segments, forward and backward."""
    found: list[Row] = []
    heads, size = (2, 16) if rehearse else (8, 64)  # of the 1.5B model
    for count in (4,) if rehearse else (4, 16, 64):
        for product in (torch.mul, torch.matmul):
            matrices = product is torch.matmul
            torch.manual_seed(0)
            B = torch.randn(
                1, count, heads, size, size, device=device, requires_grad=True
            )
            A = torch.randn(1, count, heads, size, size, device=device) / size**0.5
            A = A.requires_grad_() if matrices else (A[:, :, :1, :1, :1] > 0).float()

            def once(
                A: torch.Tensor = A, B: torch.Tensor = B, product: Product = product
            ) -> None:
                affine_scan(A, B, product).sum().backward()

            row: Row = {
                "segments": count,
                "factors": "matrices" if matrices else "scalars",
            }
            row["us"] = 1e6 * seconds_of(once, device)
            found.append(
                row | {"floor us at 3 TB/s": 1e6 * 3 * B.nbytes * (2 + matrices) / 3e12}
            )
    return found


CASES = {
    "scan": Case(scan, 30),
    "attention": Case(attention, 60),
    "model, infini": Case(partial(model, "infini"), 40),
    "model, softmax": Case(partial(model, "softmax"), 40),
}
