"""The formula against a hand count and against what PyTorch executes."""

from dataclasses import replace

import pytest
import torch

from infini_llama.model.config import (
    attention_flops,
    first_trained_layer,
    flops_per_token,
    head_flops_per_token,
    matrix_parameters,
    parameters,
    trained_parameters,
)
from infini_llama.model.llama import Llama
from infini_llama.model.loss import IGNORE_INDEX
from support.flops import counted, flop_counter
from support.models import small

# width 32, 4 query heads and 2 key-value heads of 8, inner 48, vocabulary 97, 2 layers
MATRICES = 2 * (32 * 32 + 32 * 16 + 32 * 16 + 32 * 32 + 3 * 32 * 48) + 97 * 32


def test_softmax_by_hand():
    pairs = 1 + 2 + 3 + 4 + 5
    # Four heads; Q K^T and A V; two operations for each of 8 elements.
    attention = 4 * 2 * 2 * 8 * pairs
    assert matrix_parameters(small()) == MATRICES
    assert attention_flops(small(), 5) == 2 * attention
    assert flops_per_token(small(), 5) == 6 * MATRICES + 3 * 2 * attention / 5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": False, "qk_norm": True},
        {"attention": "infini", "pre_norm": False},
        {"attention": "local"},
        {"attention": "infini", "memory_layers": [1]},
        {"attention": "infini", "tie_word_embeddings": False, "num_key_value_heads": 1},
        {"attention": "infini", "head_dim": 14, "qk_norm": True},
        {"attention": "infini", "head_dim": 14, "memory_maps": True},
        {"attention": "infini", "memory_layers": [1], "memory_maps": True},
        {"attention": "local", "memory_maps": True},
    ],
)
def test_parameters_are_those_of_the_model(fields):
    with torch.device("meta"):
        model = Llama(small(**fields))
    assert parameters(small(**fields)) == sum(
        parameter.numel() for parameter in model.parameters()
    )


@pytest.mark.parametrize(
    ("length", "pairs", "readers", "writers"),
    [
        (2, 3, 0, 0),
        (3, 6, 0, 0),
        (6, 6 + 6, 3, 3),
        (7, 6 + 6 + 1, 4, 6),
        (9, 6 + 6 + 6, 6, 6),
    ],
)
def test_infini_by_hand(length, pairs, readers, writers):
    """Segments of 3: the first reads nothing, the last writes nothing."""
    local = 4 * 2 * 2 * 8 * pairs
    # sigma(Q) M and sigma(Q) z, four query heads.
    reading = 4 * readers * (2 * 8 * 8 + 2 * 8)
    writing = 2 * writers * 2 * 8 * 8  # sigma(K)^T V, two key-value heads
    both = small(attention="infini", segment_length=3)
    assert attention_flops(both, length) == 2 * (local + reading + writing)
    assert (
        attention_flops(replace(both, memory_layers=(1,)), length)
        == 2 * local + reading + writing
    )


@pytest.mark.parametrize(
    ("length", "pairs", "readers", "writers"),
    [
        (3, 6, 0, 0),
        (6, 2 * 6 + 9, 0, 0),
        (7, 2 * 6 + 9 + 1 + 3 + 3, 1, 3),
        (12, 4 * 6 + 3 * 9 + 6 * 3, 6, 6),
    ],
)
def test_segments_that_see_the_one_before_by_hand(length, pairs, readers, writers):
    """Segments of 3, which are all sinks: the first two read nothing, the last two write nothing."""
    sees = small(attention="infini", segment_length=3, attend_previous_segment=True)
    local = 4 * 2 * 2 * 8 * pairs
    reading = 4 * readers * (2 * 8 * 8 + 2 * 8)
    writing = 2 * writers * 2 * 8 * 8
    assert attention_flops(sees, length) == 2 * (local + reading + writing)
    without = replace(sees, attention="local")
    assert attention_flops(without, length) == 2 * local
    softmax = replace(sees, attention="softmax")
    assert (
        attention_flops(softmax, length)
        == 2 * 4 * 2 * 2 * 8 * length * (length + 1) / 2
    )


@pytest.mark.parametrize(
    ("chunk", "targets", "without_logits"),
    [(0, 3, 0), (8, 32, 0), (8, 25, 0), (8, 3, 29), (8, 0, 32)],
)
@pytest.mark.parametrize(
    ("attention", "frozen", "changes"),
    [
        ("softmax", 0, {}),
        ("local", 0, {}),
        ("infini", 0, {}),
        ("infini", 2, {"num_hidden_layers": 3}),
        ("infini", 2, {"num_hidden_layers": 3, "tie_word_embeddings": True}),
        ("infini", "all_but_memory", {"num_hidden_layers": 4, "memory_layers": [1, 2]}),
        ("infini", 0, {"memory_maps": True}),
        ("infini", 0, {"attend_previous_segment": True, "memory_maps": True}),
        ("infini", 2, {"num_hidden_layers": 3, "memory_maps": True}),
        (
            "infini",
            1,
            {"num_hidden_layers": 3, "memory_layers": [2], "memory_maps": True},
        ),
        (
            "infini",
            "all_but_memory",
            {"num_hidden_layers": 4, "memory_layers": [1, 2], "memory_maps": True},
        ),
        (
            "infini",
            "all_but_memory",
            {"num_hidden_layers": 4, "memory_layers": [0, 2], "qk_norm": True},
        ),
    ],
)
def test_equals_what_is_executed(
    attention, frozen, changes, chunk, targets, without_logits
):
    settings = small(attention=attention, segment_length=8, **changes)
    model, length = Llama(settings), 32
    model.freeze(frozen)
    assert trained_parameters(settings, frozen) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    model.loss_chunk = chunk
    ids = torch.randint(0, 97, (1, length))
    labels = ids.masked_fill(torch.arange(length) >= targets, IGNORE_INDEX)
    with flop_counter() as counter:
        model.loss(ids, labels)[0].backward()
    causal = 4 * 4 * 8 * settings.attended_pairs(length)  # of a layer
    layers, below = settings.num_hidden_layers, first_trained_layer(settings, frozen)
    expected = (
        flops_per_token(settings, length, frozen) * length
        - (3 * layers - 2 * below) * causal
    )
    assert expected - head_flops_per_token(
        settings, frozen
    ) * without_logits == counted(counter)


@pytest.mark.parametrize("update", ["delta", "delta_bounded"])
def test_a_delta_update_by_hand(update):
    """Four segments of 3, of which the second and the third take out what the memory holds."""
    linear, delta = (
        small(attention="infini", segment_length=3, memory_update=kind)
        for kind in ("linear", update)
    )
    # Shares and A for each token, A M for each segment.
    taken_out = 2 * 6 * (2 * 8 + 2 * 8 * 8) + 2 * 2 * 2 * 8**3
    assert attention_flops(delta, 12) - attention_flops(linear, 12) == 2 * taken_out
    assert attention_flops(delta, 6) == attention_flops(linear, 6)
