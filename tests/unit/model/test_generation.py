"""Generation from state against the full forward, and the choice of tokens."""

import pytest
import torch
from differences import relative

from model.generate import choose, generate, keep_likely
from model.llama import Llama

N = 8


def model_of(config, attention, **changes):
    model = Llama(config(attention=attention, segment_length=N, **changes))
    for name, parameter in model.named_parameters():
        if name.endswith(".gate"):
            torch.nn.init.normal_(parameter, 0, 2)
    return model


@pytest.mark.parametrize("attention", ["softmax", "infini"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("length", [1, N - 1, N, N + 1, 2 * N, 3 * N + 7])
@torch.inference_mode()
def test_prefill_and_decode_equal_the_full_forward(config, attention, kv_heads, length):
    model = model_of(config, attention, num_key_value_heads=kv_heads)
    ids = torch.randint(0, 97, (2, length + 2 * N + 1))
    full = model(ids)
    logits, states = model.prefill(ids[:, :length], capacity=ids.shape[1])
    assert relative(logits, full[:, length - 1]) < 1e-5
    for position in range(length, ids.shape[1]):
        logits = model.decode(ids[:, position], states)
        assert relative(logits, full[:, position]) < 1e-5, position


@torch.inference_mode()
def test_decoding_stays_exact_over_many_segments(config):
    model = model_of(config, "infini").double()
    ids = torch.randint(0, 97, (1, 40 * N + 3))
    full = model(ids)
    logits, states = model.prefill(ids[:, :1], capacity=1)
    for position in range(1, ids.shape[1]):
        logits = model.decode(ids[:, position], states)
        assert relative(logits, full[:, position]) < 1e-11, position


@torch.inference_mode()
def test_the_state_of_infini_does_not_grow(config):
    model = model_of(config, "infini")
    storages, sizes = set(), set()
    for length in (1, N, 5 * N + 3, 50 * N):
        _, states = model.prefill(torch.randint(0, 97, (1, length)), capacity=10_000)
        for _ in range(2 * N + 1):
            model.decode(torch.tensor([3]), states)
            sizes.add(sum(state.size_in_bytes() for state in states))
            storages.add(sum(_storage(value) for state in states for value in vars(state).values()))
    heads, size = 2, 8
    per_layer = 4 * (
        2 * heads * N * size + 2 * heads * (size * size + size)
    )  # keys, values; M, z and what waits for them
    assert sizes == {2 * per_layer}
    assert storages == sizes  # no view that keeps a larger tensor alive


def _storage(value):
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


@pytest.mark.parametrize("attention", ["softmax", "infini"])
def test_greedy_text_is_what_the_full_forward_would_choose(config, attention):
    model = model_of(config, attention)
    prompt = torch.randint(0, 97, (3 * N + 2,)).tolist()  # longer than a segment: all of it must be read
    text = list(prompt)
    for _ in range(2 * N):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert list(generate(model, prompt, 2 * N)) == text[len(prompt) :]
    first = text[len(prompt)]
    assert list(generate(model, prompt, 2 * N, stop_id=first)) == []
    assert list(generate(model, prompt, 0)) == []


def test_a_seed_decides_the_text(config):
    model = model_of(config, "infini")
    texts = [list(generate(model, [1, 2], 30, temperature=1.0, seed=seed)) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    state = torch.get_rng_state()
    list(generate(model, [1, 2], 3, temperature=1.0))
    assert torch.equal(torch.get_rng_state(), state)


def test_generation_records_no_graph_and_leaves_the_mode_as_it_was(config):
    model = model_of(config, "softmax")
    tokens = generate(model, [1], 3)
    next(tokens)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    model(torch.tensor([[1, 2]])).sum().backward()
    assert len(list(tokens)) == 2


def test_keep_likely():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    kept = lambda **limits: keep_likely(logits, **({"top_k": None, "top_p": None} | limits)).isfinite().tolist()  # noqa: E731
    assert kept() == [True] * 4
    assert torch.equal(keep_likely(logits, None, None), logits)
    assert kept(top_k=1) == [False, True, False, False]
    assert kept(top_k=2) == [False, True, False, True]
    assert kept(top_k=100) == [True] * 4
    assert kept(top_p=0.39) == [False, True, False, False]
    assert kept(top_p=0.69) == [False, True, False, True]
    assert kept(top_p=1.0) == [True] * 4
    assert kept(top_k=2, top_p=0.5) == [False, True, False, False]  # of the two that are left, 4/7 is enough
    assert keep_likely(torch.zeros(5), 2, None).isfinite().sum() == 2  # ties do not widen it


def test_choices_follow_the_probabilities():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([choose(logits, 1.0, None, None, generator) for _ in range(4000)]).bincount(minlength=3)
    assert (drawn / 4000 - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.03
    assert choose(logits, 0.0, None, None, generator) == 0
    assert {choose(logits, 0.05, None, None, generator) for _ in range(50)} == {0}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"prompt": []}, "prompt"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_wrong_arguments_are_refused_at_once(config, arguments, word):
    with pytest.raises(ValueError, match=word):
        generate(model_of(config, "softmax"), **({"prompt": [1], "max_new_tokens": 1} | arguments))
