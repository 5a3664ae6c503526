"""Every attention backend that this GPU has, against the CPU in fp64: outputs, gradients, packed documents."""

import pytest
import torch

from infini_llama.model.backends import BACKENDS, causal_attention, flash_attention
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama

pytestmark = pytest.mark.gpu


def there(backend):
    if backend == "flash2":
        try:
            flash_attention()
        except RuntimeError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_fp64(backend, size, kv_heads, packed):
    there(backend)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 300, size).bfloat16() for heads in (8, kv_heads, kv_heads)
    )
    weights = torch.randn(2, 8, 300, size).bfloat16()
    documents = (
        torch.tensor([[0] * 100 + [1] * 170 + [-1] * 30, [3] * 7 + [4] * 293])
        if packed
        else None
    )
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = causal_attention(*exact, documents)
    gradients = torch.autograd.grad((expected * weights).sum(), exact)
    ours = [x.cuda().requires_grad_() for x in (q, k, v)]
    found = causal_attention(
        *ours, None if documents is None else documents.cuda(), backend
    )
    assert found.dtype == torch.bfloat16
    results = [found, *torch.autograd.grad((found * weights.cuda()).sum(), ours)]
    for result, other in zip(results, [expected, *gradients], strict=True):
        assert (result.cpu().double() - other).norm() / other.norm() < 2e-2


@pytest.mark.parametrize("kind", ["softmax", "infini"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_edited_document_changes_nothing_in_the_others(backend, kind):
    there(backend)
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(512, 256, 512, 2, 4, 2, 512, attention=kind, segment_length=64),
        backend,
    ).cuda()
    documents = torch.tensor([[0] * 130 + [1] * 200 + [2] * 70], device="cuda")
    before = torch.randint(0, 512, (1, 400), device="cuda")
    after = before.clone()
    after[0, 150] = (before[0, 150] + 1) % 512
    with torch.autocast("cuda", torch.bfloat16), torch.inference_mode():
        changed = (model(before, documents) != model(after, documents)).any(dim=2)[0]
    assert not changed[documents[0] != 1].any() and changed[150]


@pytest.mark.parametrize("update", ["linear", "delta", "delta_bounded"])
def test_the_memory_equals_the_cpus(update):
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    config = LlamaConfig(
        512,
        128,
        256,
        2,
        4,
        2,
        512,
        attention="infini",
        segment_length=32,
        memory_update=update,
    )
    model = Llama(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".gate"):
                parameter.normal_()
    ids = torch.randint(0, 512, (2, 300))
    documents = torch.tensor([[0] * 130 + [1] * 170, [2] * 300])
    for packed in (None, documents):
        cpu = model.cpu()(ids, packed)
        gpu = model.cuda()(ids.cuda(), None if packed is None else packed.cuda()).cpu()
        assert torch.allclose(cpu, gpu, rtol=1e-3, atol=1e-4)
