"""Abilities of torch with the GPUs, as one line of JSON.

Run as `python -m infini_llama.tasks.patch_environment.gpu_probe [import]`: a process of its own, so
that the command neither loads torch nor holds a GPU. With `import`, no GPU is touched: only whether
flash-attn can be imported is reported.
"""

import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from infini_llama.model.backends import causal_attention, flash_attention
from infini_llama.tasks.patch_environment.gpus import FLASH_HEAD_SIZES
from infini_llama.tasks.records.machine import Gpu, GpuFacts

# Difference that rounding explains, as a share of the reference's largest entry (bf16 has 8 bits,
# and a gradient sums over a row).
TOLERANCE = 3e-2


def flash_fault(on_gpu: bool) -> str:
    """Reason why flash-attn cannot be used.

    "" if it can be imported and, on a GPU, agrees with exact attention.
    """
    try:
        flash_attention()
    except Exception as error:
        return str(error.__cause__ or error)
    if not on_gpu:
        return ""
    for head_dim in FLASH_HEAD_SIZES:
        for has_documents in (False, True):
            fault = _fault_of_trial(head_dim, has_documents)
            if fault:
                return fault
    return ""


def _fault_of_trial(head_dim: int, has_documents: bool) -> str:
    """Reason why flash-attn fails in bf16 with this head size.

    "" if output and gradients agree with those of exact attention in fp32.
    """
    batch = 2
    heads = 4
    kv_heads = 2
    length = 200
    generator = torch.Generator("cuda").manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        shape = (batch, heads, length, head_dim)
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    inputs = [random(heads), random(kv_heads), random(kv_heads)]
    downstream = random(heads)
    documents = None
    if has_documents:
        document_of_row = torch.arange(length, device="cuda") // (length // 3)
        documents = document_of_row.repeat(batch, 1)

    def run(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """The output, and the gradients of queries, keys and values."""
        q, k, v = (tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs)
        output = causal_attention(q, k, v, documents, backend)
        return [
            output.detach(),
            *torch.autograd.grad(output, (q, k, v), downstream.to(dtype)),
        ]

    with sdpa_kernel(SDPBackend.MATH):
        exact = run("sdpa", torch.float32)
    try:
        results = run("flash2", torch.bfloat16)
        torch.cuda.synchronize()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    difference = max(
        ((result.float() - reference).abs().max() / reference.abs().max()).item()
        for result, reference in zip(results, exact, strict=True)
    )
    if difference <= TOLERANCE:
        return ""
    return f"it differs from plain mathematics by {difference:.2g}"


def devices() -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves."""
    torch.cuda.init()
    gpus: list[Gpu] = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        gpus.append(
            Gpu(
                name=properties.name,
                capability=(properties.major, properties.minor),
                memory=total,
                free=free,
                bf16=bf16,
                uuid=str(getattr(properties, "uuid", "")),
            )
        )
    return tuple(gpus)


def main() -> None:
    gpus = () if sys.argv[1:] == ["import"] else devices()
    fault = flash_fault(on_gpu=bool(gpus) and gpus[0].bf16)
    facts = GpuFacts(
        gpus=gpus, nccl=torch.distributed.is_nccl_available(), flash_attention=fault
    )
    print("\n" + json.dumps(facts.to_json()))


if __name__ == "__main__":
    main()
