"""What torch.compile makes of the model: one graph, and the losses and gradients of eager execution."""

import pytest
import torch

from infini_llama.model.llama import Llama
from support.models import small

KINDS = {
    "softmax": {"attention": "softmax"},
    "linear": {"attention": "infini"},
    "delta_bounded": {
        "attention": "infini",
        "memory_update": "delta_bounded",
        "qk_norm": True,
    },
    "the segment before": {"attention": "infini", "attend_previous_segment": True},
}


DOCUMENTS = torch.tensor([[0] * 11 + [1] * 18, [0] * 25 + [-1] * 4])


def assert_same_losses_and_gradients(model, compiled, ids, documents):
    results = []
    for loss in (model.loss, compiled):
        model.zero_grad()
        total, _ = loss(ids[:, :-1], ids[:, 1:], documents)
        total.backward()
        results.append(
            [total.detach(), *(parameter.grad for parameter in model.parameters())]
        )
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_does_not_break(kind, packed):
    """torch.compile could take the loss whole: traced by Dynamo alone, as its back end is not what is tested."""
    torch.compiler.reset()
    model = Llama(small(**KINDS[kind]))
    ids = torch.randint(0, 97, (2, 30))
    documents = DOCUMENTS if packed else None
    compiled = torch.compile(model.loss, fullgraph=True, backend="eager")
    expected = model.loss(ids[:, :-1], ids[:, 1:], documents)[0]
    assert torch.allclose(
        compiled(ids[:, :-1], ids[:, 1:], documents)[0], expected, rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_losses_and_gradients_are_those_of_eager(kind, packed):
    torch.compiler.reset()
    model = Llama(small(**KINDS[kind], num_hidden_layers=1)).double()
    ids = torch.randint(0, 97, (2, 30))
    documents = DOCUMENTS if packed else None
    compiled = torch.compile(model.loss, fullgraph=True)
    assert_same_losses_and_gradients(model, compiled, ids, documents)
    if packed:  # an edit of one document does not reach the other
        edited = ids.clone()
        edited[0, 0] = (ids[0, 0] + 1) % 97
        compiled = torch.compile(model.forward, fullgraph=True)
        changed = (
            compiled(ids[:, :-1], documents) != compiled(edited[:, :-1], documents)
        ).any(dim=2)
        assert changed[0, 0] and not changed[0, 11:].any() and not changed[1].any()


@pytest.mark.parametrize(
    ("attention", "checkpointing"), [("softmax", "selective"), ("infini", "full")]
)
def test_a_compiled_loss_in_chunks_is_that_of_eager(attention, checkpointing):
    """By the back end that generates no code: what chunks and recomputation ask of Dynamo and autograd is tested."""
    torch.compiler.reset()
    model = Llama(small(attention=attention, num_hidden_layers=1)).double()
    model.loss_chunk, model.z_loss = 10, 1e-3
    model.checkpoint_activations(checkpointing)
    ids = torch.randint(0, 97, (2, 30))
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    assert_same_losses_and_gradients(model, compiled, ids, None)
