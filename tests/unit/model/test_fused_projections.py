"""Projections as one matrix product: the same losses and gradients by rounding, in training only, under the same names."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infini_llama.model.llama import Llama
from support.differences import relative

KINDS = {
    "softmax": {},
    "one key-value head, qk_norm": {"num_key_value_heads": 1, "qk_norm": True},
    "infini": {"attention": "infini", "memory_update": "delta"},
    "local, head_dim": {"attention": "local", "head_dim": 6, "hidden_act": "gelu"},
}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def learned(model, half, documents=None):
    """Loss and gradients, and the matrix products of forward and backward."""
    ids = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    with Products() as products:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            total, _ = model.loss(ids[:, :-1], ids[:, 1:], documents)
        total.backward()
    assert all(parameter.grad.dtype == parameter.dtype for parameter in model.parameters())
    return [total.detach(), *(parameter.grad for parameter in model.parameters())], products.count


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_the_same_with_fewer_products(config, kind, checkpointing):
    model = Llama(config(**KINDS[kind])).double()
    model.checkpoint_activations(checkpointing)
    expected, separate = learned(model, half=False)
    model.fuse_projections(True)
    found, fused = learned(model, half=False)
    # 5 projections become 2 in each of two layers: forward, gradient of x and gradient of the weights.
    assert fused == separate - 2 * 3 * 3 - (2 * 3 if checkpointing == "full" else 0)
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 1e-12
    model.fuse_projections(False)
    assert all(torch.equal(one, other) for one, other in zip(learned(model, half=False)[0], expected, strict=True))


def test_under_autocast_products_are_in_half_precision(config):
    model = Llama(config())
    expected, _ = learned(model.double(), half=False)
    model.float()
    separate, _ = learned(model, half=True)
    model.fuse_projections(True)
    fused, _ = learned(model, half=True)
    for one, other, exact in zip(fused, separate, expected, strict=True):
        assert relative(one, exact) < 1.5 * relative(other, exact) + 1e-3


def test_packed_documents(config):
    model = Llama(config(attention="infini")).double()
    documents = torch.tensor([[0] * 11 + [1] * 18, [0] * 25 + [-1] * 4])
    expected, _ = learned(model, False, documents)
    model.fuse_projections(True)
    for one, other in zip(learned(model, False, documents)[0], expected, strict=True):
        assert relative(one, other) < 1e-12


def test_only_training_is_fused(config):
    """Generation would stack the weights for every token."""
    model = Llama(config()).eval()
    ids = torch.randint(0, 97, (2, 30))
    with torch.no_grad():
        expected = model(ids)
        model.fuse_projections(True)
        with Products() as products:
            assert torch.equal(model(ids), expected)
    assert products.count == 2 * 7 + 1


def test_names_and_weights_do_not_change(config):
    model = Llama(config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.fuse_projections(True)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
