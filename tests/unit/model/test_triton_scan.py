"""The Triton kernel of the memory's scan, in Triton's interpreter on the CPU, against the plain path."""

import importlib
import importlib.util
import os
import sys

import pytest
import torch

from infini_llama.model import scan as plain
from infini_llama.model.memory import memories
from infini_llama.model.scan import plain_scan

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself"),
]


@pytest.fixture(scope="module")
def kernel():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
    try:
        yield importlib.import_module("infini_llama.model.triton_scan")
    finally:
        os.environ.pop("TRITON_INTERPRET")
        sys.modules.pop("infini_llama.model.triton_scan")


def compared(kernel, A, B, product):
    """Relative differences of the result and of the gradients of those inputs that need one."""
    matrices = product is torch.matmul
    assert kernel.fits(A, B, matrices)
    weights = torch.randn_like(B)
    needed = [x for x in (A, B) if x.requires_grad]
    expected, found = plain_scan(A, B, product), kernel.scan(A, B, matrices)
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad((found * weights).sum(), needed),
        torch.autograd.grad((expected * weights).sum(), needed),
        strict=True,
    )
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("segments", [2, 5, 8])
@pytest.mark.parametrize("shape", [(3, 7), (2, 64, 33)])
def test_scalar_factors(kernel, segments, shape):
    torch.manual_seed(0)
    B = torch.randn(2, segments, *shape, requires_grad=True)
    A = torch.randint(0, 2, (2, segments, *(1 for _ in shape))).float()
    assert max(compared(kernel, A, B, torch.mul)) < 1e-6


@pytest.mark.parametrize("segments", [2, 5, 8])
@pytest.mark.parametrize(("size", "columns"), [(16, 16), (32, 64), (64, 33)])
def test_matrices(kernel, segments, size, columns):
    torch.manual_seed(0)
    A = (torch.randn(2, segments, 3, size, size) / size**0.5).requires_grad_()
    B = torch.randn(2, segments, 3, size, columns, requires_grad=True)
    assert max(compared(kernel, A, B, torch.matmul)) < 1e-5


def test_cases_the_kernel_does_not_support_are_refused(kernel):
    A, B = torch.randn(2, 5, 3, 16, 16), torch.randn(2, 5, 3, 16, 16)
    assert kernel.fits(A, B, True) and not kernel.fits(A.double(), B.double(), True)
    assert not kernel.fits(A[..., :12, :12], B[..., :12, :], True) and not kernel.fits(A, B, False)
    assert not kernel.fits(torch.ones(2, 5, 1, 1, 1, requires_grad=True), B, False)


def test_the_trial_before_the_kernel_is_used(kernel, monkeypatch):
    assert plain.disagreement(kernel, torch.device("cpu")) < 1e-5
    exact = kernel.scan
    monkeypatch.setattr(kernel, "scan", lambda *arguments: exact(*arguments) * 1.01)
    assert plain.disagreement(kernel, torch.device("cpu")) > plain.TOLERANCE


@pytest.mark.parametrize("update", ["linear", "delta", "delta_bounded"])
def test_memories_of_documents_are_those_of_the_plain_path(kernel, update, monkeypatch):
    torch.manual_seed(0)
    k, v = torch.randn(2, 6, 2, 8, 16), torch.randn(2, 6, 2, 8, 16)
    keeps = torch.tensor([[False, True, True, False, True, True], [False, False, True, True, True, False]])
    expected = memories(k, v, update, None, keeps)
    used = []

    def by_kernel(A, B, product):
        if not kernel.fits(A, B, product is torch.matmul):
            return plain_scan(A, B, product)
        used.append(product)
        return kernel.scan(A, B, product is torch.matmul)

    monkeypatch.setattr("infini_llama.model.memory.scan", by_kernel)
    found = memories(k, v, update, None, keeps)
    assert used and all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True))
