"""Abilities of torch with the GPUs, as one line of JSON: python -m infini_llama.tasks.patch_environment.gpu_probe [import]

A process of its own, so that the command neither loads torch nor holds a GPU. With `import`, no GPU is touched: only whether
flash-attn can be imported is reported.
"""

import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from infini_llama.model.backends import causal_attention, flash_attention
from infini_llama.tasks.patch_environment.gpus import FLASH_HEAD_SIZES
from infini_llama.tasks.records.machine import Gpu, GpuFacts

# Of the reference's largest entry: what rounding explains (bf16 has 8 bits, and a gradient sums over a row).
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class AttentionTrial:
    """Inputs of softmax attention, run forward and backward by any backend.

    Args:
        shape: of the queries, [batch, heads, length, head_dim]; keys and values have `kv_heads` heads.
        documents: each row holds several documents.
    """

    def __init__(
        self, device: str, dtype: torch.dtype, shape: tuple[int, int, int, int], kv_heads: int, documents: bool = False
    ) -> None:
        batch, heads, length, head_dim = shape
        generator = torch.Generator(device).manual_seed(0)

        def random(heads: int) -> torch.Tensor:
            return torch.randn((batch, heads, length, head_dim), generator=generator, device=device).to(dtype)

        self.device, self.dtype = device, dtype
        self.inputs = [random(heads), random(kv_heads), random(kv_heads)]
        self.downstream = random(heads)
        self.documents: torch.Tensor | None = None
        if documents:
            self.documents = (torch.arange(length, device=device) // max(1, length // 3)).repeat(batch, 1)

    def run(self, backend: str, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """The output, and the gradients of queries, keys and values."""
        dtype = dtype or self.dtype
        q, k, v = (tensor.detach().clone().to(dtype).requires_grad_() for tensor in self.inputs)
        output = causal_attention(q, k, v, self.documents, backend)
        output.backward(self.downstream.to(dtype))
        if self.device == "cuda":
            torch.cuda.synchronize()
        return [output.detach(), *(tensor.grad for tensor in (q, k, v) if tensor.grad is not None)]

    def fault(self, backend: str) -> str:
        """Why the backend cannot be used; "" if it agrees with exact attention in fp32."""
        with sdpa_kernel(SDPBackend.MATH):
            exact = self.run("sdpa", torch.float32)
        try:
            results = self.run(backend)
        except Exception as error:
            return " ".join(f"{type(error).__name__}: {error}".split())[:300]
        pairs = zip(results, exact, strict=True)
        difference = max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        return "" if difference <= TOLERANCE[self.dtype] else f"it differs from plain mathematics by {difference:.2g}"


def flash_fault(on_gpu: bool) -> str:
    """Why flash-attn cannot be used; "" if it can be imported and, on a GPU, agrees with exact attention."""
    try:
        flash_attention()
    except BaseException as error:
        return str(error.__cause__ or error)
    if not on_gpu:
        return ""
    for head_dim in FLASH_HEAD_SIZES:
        for documents in (False, True):
            trial = AttentionTrial("cuda", torch.bfloat16, (2, 4, 200, head_dim), 2, documents)
            if fault := trial.fault("flash2"):
                return fault
    return ""


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
    facts = GpuFacts(gpus=gpus, nccl=torch.distributed.is_nccl_available(), flash_attention=fault)
    print("\n" + json.dumps(facts.to_json()))


if __name__ == "__main__":
    main()
