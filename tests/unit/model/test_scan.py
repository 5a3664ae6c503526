"""The parallel recurrence against a loop."""

import pytest
import torch

from infini_llama.model.memory import scan
from support.differences import largest


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 13, 31, 64])
@pytest.mark.parametrize("product", [torch.mul, torch.matmul])
def test_equals_a_loop(length, product):
    A = torch.randn(2, length, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    B = torch.randn(2, length, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    x, steps = torch.zeros(2, 3, 4, 4, dtype=torch.float64), []
    for s in range(length):
        x = product(A[:, s], x) + B[:, s]
        steps.append(x)
    expected, found = torch.stack(steps, dim=1), scan(A, B, product)
    scale = expected.abs().max()
    assert largest(found / scale, expected / scale) < 1e-13
    weights = torch.randn_like(expected) / scale
    for inputs in (A, B):
        gradients = [
            torch.autograd.grad(
                (y * weights).sum(), inputs, retain_graph=True, allow_unused=True
            )[0]
            for y in (found, expected)
        ]
        if gradients[0] is None:  # one step: A stands before nothing
            assert length == 1 and not gradients[1].any()
            continue
        assert largest(gradients[0], gradients[1]) < 1e-12 * max(
            1.0, gradients[1].abs().max().item()
        )
