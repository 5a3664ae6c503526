"""The loss in chunks against the plain one, z-loss, and what is computed again in the backward pass."""

import pytest
import torch

from infini_llama.model import attention as softmax_attention
from infini_llama.model import blocked, layers
from infini_llama.model.llama import Llama
from infini_llama.model.loss import (
    IGNORE_INDEX,
    chunked_cross_entropy_sum,
    cross_entropy_sum,
)
from support.differences import largest, relative
from support.models import small

V, D = 53, 16


def batch(dtype=torch.float64):
    hidden = torch.randn(3, 7, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, V, (3, 7))
    labels[0, :3] = labels[2] = IGNORE_INDEX
    return hidden, weight, labels


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [1, 4, 7, 20, 21, 100])
def test_chunks_equal_the_plain_loss(chunk, z_loss):
    hidden, weight, labels = batch()
    plain, count = cross_entropy_sum(hidden @ weight.T, labels, z_loss)
    found, same = chunked_cross_entropy_sum(hidden, weight, labels, chunk, z_loss)
    assert count == same == 11 and abs(plain - found) < 1e-11
    expected = torch.autograd.grad(plain * 0.37, (hidden, weight))
    gradients = torch.autograd.grad(found * 0.37, (hidden, weight))
    for gradient, other in zip(gradients, expected, strict=True):
        assert largest(gradient, other) < 1e-10


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [0, 1, 4, 20])
def test_weights_of_rows_are_in_the_gradient_and_not_in_the_value(chunk, z_loss):
    """Against the loss of each row alone, times its weight."""
    hidden, weight, labels = batch()
    labels[2, 3] = 7
    weights = torch.tensor([0.5, 3.0, 11.0], dtype=torch.float64)
    rows = [
        cross_entropy_sum(hidden[[row]] @ weight.T, labels[[row]], z_loss)[0]
        for row in range(3)
    ]
    if chunk:
        found, count = chunked_cross_entropy_sum(
            hidden, weight, labels, chunk, z_loss, row_weights=weights
        )
    else:
        found, count = cross_entropy_sum(hidden @ weight.T, labels, z_loss, weights)
    assert count == 12 and abs(sum(rows) - found) < 1e-11
    weighted = sum(value * total for value, total in zip(weights, rows, strict=True))
    expected = torch.autograd.grad(weighted, (hidden, weight), retain_graph=True)
    for gradient, other in zip(
        torch.autograd.grad(found, (hidden, weight)), expected, strict=True
    ):
        assert largest(gradient, other) < 1e-10


def test_chunks_in_half_precision_are_as_exact_as_the_plain_loss():
    hidden, weight, labels = batch(torch.float32)
    exact = torch.autograd.grad(
        cross_entropy_sum(hidden.double() @ weight.double().T, labels)[0],
        (hidden, weight),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = cross_entropy_sum(torch.nn.functional.linear(hidden, weight), labels)[0]
        chunked = chunked_cross_entropy_sum(hidden, weight, labels, 4)[0]
    assert chunked.dtype == torch.float32 and relative(chunked, plain) < 1e-5
    for total in (plain, chunked):
        gradients = torch.autograd.grad(total, (hidden, weight))
        for gradient, other in zip(gradients, exact, strict=True):
            assert gradient.dtype == torch.float32 and relative(gradient, other) < 2e-2


def test_a_label_without_any_probability_has_its_loss():
    hidden = torch.tensor([[[1.0], [1.0]]], requires_grad=True)
    weight = torch.tensor([[0.0], [800.0], [799.0]], requires_grad=True)
    labels = torch.tensor([[0, 2]])
    plain = cross_entropy_sum(hidden @ weight.T, labels)[0]
    chunked = chunked_cross_entropy_sum(hidden, weight, labels, 2)[0]
    assert plain > 800 and torch.allclose(chunked, plain)
    expected = torch.autograd.grad(plain, (hidden, weight))
    for found, other in zip(
        torch.autograd.grad(chunked, (hidden, weight)), expected, strict=True
    ):
        assert torch.allclose(found, other)


def test_z_loss_is_in_the_gradient_and_not_in_the_value():
    """Against its definition: 0.01 log^2 Z of every target."""
    hidden, weight, labels = batch()
    logits = hidden @ weight.T
    plain = cross_entropy_sum(logits, labels)[0]
    with_z = cross_entropy_sum(logits, labels, 0.01)[0]
    assert torch.equal(plain, with_z)
    penalty = sum(
        0.01 * logits[b, t].exp().sum().log() ** 2
        for b in range(3)
        for t in range(7)
        if labels[b, t] >= 0
    )
    expected = torch.autograd.grad(plain + penalty, hidden, retain_graph=True)[0]
    assert largest(torch.autograd.grad(with_z, hidden)[0], expected) < 1e-12


def test_without_gradients_no_memory_is_taken_for_them():
    hidden, weight, labels = batch()
    with torch.no_grad():
        total, _ = chunked_cross_entropy_sum(hidden, weight, labels, 4)
    assert not total.requires_grad and torch.allclose(
        total, cross_entropy_sum(hidden @ weight.T, labels)[0]
    )
    frozen, _ = chunked_cross_entropy_sum(hidden, weight.detach(), labels, 4)
    plain, _ = cross_entropy_sum(hidden @ weight.T, labels)
    assert (
        largest(*(torch.autograd.grad(sum_, hidden)[0] for sum_ in (frozen, plain)))
        < 1e-10
    )


@pytest.mark.parametrize("targets", [0, 1, 3])
def test_tokens_without_a_target_have_no_logits(targets):
    """Were they computed, what is not a number there would be in the gradient of every weight."""
    hidden, weight, _ = batch()
    labels = torch.full((3, 7), IGNORE_INDEX)
    labels.view(-1)[5 : 5 + targets] = 2
    broken = (
        hidden.detach()
        .masked_fill((labels == IGNORE_INDEX)[..., None], torch.nan)
        .requires_grad_()
    )
    found, count = chunked_cross_entropy_sum(broken, weight, labels, 4)
    plain, _ = cross_entropy_sum(hidden @ weight.T, labels)
    assert count == targets and abs(found - plain) < 1e-11
    expected = torch.autograd.grad(plain, (hidden, weight))
    for gradient, other in zip(
        torch.autograd.grad(found, (broken, weight)), expected, strict=True
    ):
        assert largest(gradient, other) < 1e-10


def gradients(
    model: Llama, ids: torch.Tensor, checkpointing: str
) -> list[torch.Tensor | None]:
    """The loss and the gradient of each parameter, from the same random numbers."""
    model.checkpoint_activations(checkpointing)
    model.zero_grad()
    torch.manual_seed(3)
    total, _ = model.loss(ids[:, :-1], ids[:, 1:])
    total.backward()
    return [total.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_equal(
    values: list[torch.Tensor | None], others: list[torch.Tensor | None]
) -> None:
    for value, other in zip(values, others, strict=True):
        assert value is not None and other is not None and torch.equal(value, other)


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("attention", ["softmax", "infini"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputed_activations_change_no_bit(attention, dropout, kind):
    model = Llama(
        small(attention=attention, hidden_dropout=dropout, attention_dropout=dropout)
    )
    ids = torch.randint(0, 97, (2, 30))
    results, kept = [], []
    for checkpointing in ("none", kind):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, s=sizes: s.append(x.nbytes) or x, lambda x: x
        ):
            results.append(gradients(model, ids, checkpointing))
        kept.append(sum(sizes))
    assert_equal(*results)
    assert kept[1] < kept[0]


@torch.library.custom_op("infini_llama_tests::fused_dropout", mutates_args=())
def fused_dropout(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Stands for attention with dropout on a GPU, one operator that draws; a CPU's consists of several."""
    return x * (torch.rand_like(x) >= dropout_p)


fused_dropout.register_fake(lambda x, dropout_p: torch.empty_like(x))
fused_dropout.register_autograd(
    lambda ctx, gradient: (gradient * ctx.kept, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "kept", output != 0),
)


@pytest.mark.parametrize("jitter", [False, True])
def test_selective_checkpointing_draws_the_same_numbers_after_attention_with_dropout(
    jitter, monkeypatch
):
    model = Llama(small(attention="infini", hidden_dropout=0.0 if jitter else 0.3))
    if jitter:
        model.set_write_jitter(8.0)
    real = softmax_attention.causal_attention
    monkeypatch.setattr(
        softmax_attention,
        "causal_attention",
        lambda *given: fused_dropout(real(*given), 0.3),
    )
    monkeypatch.setattr(
        layers, "EXPENSIVE", layers.EXPENSIVE | {fused_dropout._opoverload}
    )
    ids = torch.randint(0, 97, (2, 30))
    assert_equal(gradients(model, ids, "none"), gradients(model, ids, "selective"))


@pytest.mark.parametrize(("kind", "passes"), [("selective", 2), ("full", 3)])
def test_selective_checkpointing_keeps_the_result_of_blocked_attention(
    kind, passes, monkeypatch
):
    """A forward and a backward pass per layer, and with `full` another forward pass."""
    model, ids = Llama(small(), "blocked"), torch.randint(0, 97, (2, 30))
    calls, real = [], blocked._blocks
    monkeypatch.setattr(
        blocked, "_blocks", lambda *given: calls.append(1) or real(*given)
    )
    expected = gradients(model, ids, "none")
    calls.clear()
    model.keep_attention_weights(False)
    assert_equal(expected, gradients(model, ids, kind))
    assert len(calls) == passes * len(model.model.layers)
