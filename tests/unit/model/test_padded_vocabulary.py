"""Rows that pad embedding and head: no effect on the other weights, the loss, what is sampled, or an exported folder."""

import pytest
import torch

from infini_llama.model.config import flops_per_token, parameters
from infini_llama.model.llama import Llama
from support.differences import relative
from support.models import generate, small

SIZE, PADDED = 97, 128


def pair(**fields):
    """The same model without and with padding, from the same seed."""
    models = []
    for multiple in (1, 64):
        torch.manual_seed(0)
        models.append(Llama(small(**fields, pad_vocab_to_multiple_of=multiple)))
    return models


@pytest.mark.parametrize("tied", [False, True])
def test_the_initial_weights_are_those_without_padding(tied):
    plain, padded = pair(tie_word_embeddings=tied)
    state = padded.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(state[name][: len(tensor)], tensor), name
        assert not state[name][len(tensor) :].any()
    assert state["lm_head.weight"].shape[0] == PADDED
    assert parameters(padded.config) == sum(
        parameter.numel() for parameter in padded.parameters()
    )
    assert flops_per_token(padded.config, 32) == flops_per_token(plain.config, 32), (
        "padding is no work that counts"
    )


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("chunk", [0, 10])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_the_whole_logits_without_padding(
    tied, chunk, z_loss
):
    ids = torch.randint(0, SIZE, (2, 30))
    plain, padded = pair(tie_word_embeddings=tied)
    padded.loss_chunk = chunk
    results = []
    for model in (plain, padded):
        model.double()
        model.z_loss = z_loss
        total, _ = model.loss(ids[:, :-1], ids[:, 1:])
        total.backward()
        results.append(
            (
                total.detach(),
                {name: value.grad for name, value in model.named_parameters()},
            )
        )
    (loss, expected), (padded_loss, found) = results
    assert relative(padded_loss, loss) < 1e-10
    for name, gradient in expected.items():
        assert relative(found[name][: len(gradient)], gradient) < 1e-10, name
        assert not found[name][len(gradient) :].any(), "padding never learns"


@pytest.mark.parametrize("attention", ["softmax", "infini"])
def test_padding_is_never_sampled(attention):
    plain, padded = pair(attention=attention)
    with torch.no_grad():  # as if it were by far the likeliest, whatever was read
        padded.lm_head.weight[SIZE:] = 1e3 * padded.model.norm.weight
        padded.lm_head.weight[SIZE + 1 :] *= -1
    prompt = list(range(20))
    assert generate(padded, prompt, 12) == generate(plain, prompt, 12)
    ids = torch.tensor([prompt])
    assert padded(ids).shape[-1] == SIZE
    assert torch.allclose(padded(ids), plain(ids), atol=1e-5)
