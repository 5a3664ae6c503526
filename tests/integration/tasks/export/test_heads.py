"""Which heads retrieve: the attention weights against transformers', and scores of heads that are known."""

import pytest
import torch
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM

from infini_llama.model.hf import config_from_hf
from infini_llama.model.llama import Llama
from infini_llama.tasks.evaluate.heads import induction
from infini_llama.tasks.records.heads import HeadScores, MemoryKeys
from support.models import small


@torch.inference_mode()
def test_attention_weights_are_those_of_transformers():
    # Fmt: skip.
    config = TheirConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    theirs = LlamaForCausalLM(config).eval()
    ours = Llama(config_from_hf(config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    ids, positions = torch.randint(0, 97, (2, 20)), torch.tensor([0, 7, 19])
    expected = theirs(ids, output_attentions=True)
    weights, hidden = ours.attention_weights(ids, positions)
    stacked = torch.stack([layer[:, :, positions] for layer in expected.attentions])
    torch.testing.assert_close(weights, stacked, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.logits(hidden), expected.logits, rtol=0, atol=1e-4)


@torch.no_grad()
def test_an_induction_head_is_found():
    """Layer 0, head 1 copies the token before into the stream; layer 1, head 2 looks for the current one among those."""
    size = 64
    model = Llama(
        small(
            num_hidden_layers=2,
            hidden_size=4 * size,
            num_key_value_heads=4,
            vocab_size=4000,
            rope_theta=1e30,
        )
    )
    for layer in model.model.layers:
        for parameter in layer.parameters():
            parameter.zero_()
        layer.input_layernorm.weight.fill_(1.0)
    first, second = (layer.self_attn for layer in model.model.layers)
    # Of one length, so that norms change none.
    vectors = torch.nn.functional.normalize(torch.randn(4000, size)) * 8
    model.model.embed_tokens.weight.zero_()
    model.model.embed_tokens.weight[:, :size] = vectors
    # The same in every token: what positions are compared by.
    model.model.embed_tokens.weight[:, -1] = 8.0
    head_1, head_2 = slice(size, 2 * size), slice(2 * size, 3 * size)
    angles = 1e30 ** (-2 * torch.arange(size // 2) / size)
    # of the constant: a key as it is, and a query that is turned back by one position
    first.k_proj.weight[size : size + size // 2, -1] = 10
    first.q_proj.weight[head_1, -1] = (
        torch.cat((torch.cos(angles), -torch.sin(angles))) * 10
    )
    first.v_proj.weight[head_1, :size] = torch.eye(size)
    first.o_proj.weight[size : 2 * size, head_1] = torch.eye(size)
    second.q_proj.weight[head_2, :size] = torch.eye(size) * 30
    second.k_proj.weight[head_2, size : 2 * size] = torch.eye(size)
    scores = induction(model, torch.Generator().manual_seed(0))
    assert scores[1, 2] > 0.5 and scores[0].max() < 0.2 and scores[1, :2].max() < 0.2


def scores(**changes):
    low, high = (0.1, 0.1), (0.9, 0.3)
    fields = {
        "model": "m",
        "texts": 4,
        "found": 4,
        "retrieval": (low, high, low, high),
        "induction": (high, low, low, high),
    }
    return HeadScores(**(fields | changes))


def test_the_keys_follow_from_heads_that_retrieve_and_repeat():
    assert scores().retrieving == [
        (1, 0),
        (3, 0),
        (1, 1),
        (3, 1),
    ] and scores().for_memory == [
        (3, 0),
        (3, 1),
    ]
    one = scores(induction=((0.0, 0.0), (0.0, 0.9), (0.0, 0.0), (0.9, 0.0)))
    assert one.keys() == MemoryKeys(
        memory_layers=(1, 3), init_gate=((-5.0, 1.0), (1.0, -5.0)), frozen_layers=1
    )


@pytest.mark.parametrize(
    "changes",
    [{"found": 1}, {"retrieval": ((0.2, 0.2),) * 4}, {"induction": ((0.2, 0.2),) * 4}],
)
def test_no_keys_without_such_heads(changes):
    assert scores(**changes).keys() is None
