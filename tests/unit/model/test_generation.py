"""Generation from state against the full forward, and the choice of tokens."""

import pytest
import torch
from differences import largest, relative

from model.generate import choose, generate, keep_likely
from model.infini_attention import InfiniAttention, InfiniState
from model.llama import Llama
from model.rope import rotary

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


@pytest.mark.parametrize("length", [1, N - 1, N, N + 1, 2 * N, 3 * N + 7])
@torch.inference_mode()
def test_the_state_holds_the_tokens_of_the_prompt_and_no_padding(config, length):
    layer = model_of(config, "infini").double().get_submodule("model.layers.0.self_attn")
    assert isinstance(layer, InfiniAttention)
    x = torch.randn(2, length, 32, dtype=torch.float64)
    _, state = layer.prefill(x, rotary(torch.arange(min(length, N)), 8, 10_000.0, torch.float64), capacity=length)
    _, k, v = layer.project(x)
    features, completed = torch.nn.functional.elu(k) + 1, length // N * N
    for tokens, M, z in (
        (slice(0, completed), state.M, state.z),
        (slice(completed, length), state.pending_M, state.pending_z),
    ):
        part = features[:, :, tokens]
        assert largest(M, part.transpose(-1, -2) @ v[:, :, tokens]) < 1e-11
        assert largest(z, part.sum(dim=2)) < 1e-11
    assert (state.segments, state.filled) == divmod(length, N)


@torch.inference_mode()
def test_decoding_in_bf16_keeps_the_memory_in_fp32(config):
    """64 segments, token by token: rounding of the inputs stays, rounding of the sums would pile up."""
    model = model_of(config, "infini", num_hidden_layers=1, initializer_range=0.1)
    layer = model.get_submodule("model.layers.0.self_attn")
    assert isinstance(layer, InfiniAttention)
    ids = torch.randint(0, 97, (1, 64 * N))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, states = model.prefill(ids[:, :3], capacity=ids.shape[1])
        for position in range(3, ids.shape[1]):
            model.decode(ids[:, position], states)
        _, k, v = layer.project(model.model.layers[0].get_submodule("input_layernorm")(model.model.embed_tokens(ids)))
    assert isinstance(state := states[0], InfiniState)
    features = torch.nn.functional.elu(k.double()) + 1
    assert k.dtype == torch.bfloat16 and state.M.dtype == state.z.dtype == torch.float32
    assert relative(state.M, features.transpose(-1, -2) @ v.double()) < 1e-5
    assert relative(state.z, features.sum(dim=2)) < 1e-5


def _storage(value):
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


@pytest.mark.parametrize("attention", ["softmax", "infini"])
def test_greedy_text_is_what_the_full_forward_would_choose(config, attention):
    model = model_of(config, attention)
    prompt = torch.randint(0, 97, (3 * N + 2,)).tolist()  # longer than a segment: all of it must be read
    text = list(prompt)
    for _ in range(2 * N):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    new = text[len(prompt) :]
    assert list(generate(model, prompt, 2 * N)) == new
    for stop in set(new):
        assert list(generate(model, prompt, 2 * N, stop_id=stop)) == new[: new.index(stop)]
    assert list(generate(model, prompt, 0)) == []


@pytest.mark.parametrize("attention", ["softmax", "infini"])
def test_every_token_of_a_long_prompt_is_read(config, attention):
    model = model_of(config, attention, num_hidden_layers=1).double()
    prompt = torch.randint(0, 97, (1, 5 * N + 3))
    with torch.inference_mode():
        logits, _ = model.prefill(prompt, capacity=prompt.shape[1])
        for position in range(prompt.shape[1]):
            edited = prompt.clone()
            edited[0, position] = (edited[0, position] + 1) % 97
            assert largest(model.prefill(edited, capacity=prompt.shape[1])[0], logits) > 1e-9, position


def test_a_seed_decides_the_text(config):
    model = model_of(config, "infini")
    texts = [list(generate(model, [1, 2], 30, temperature=1.0, seed=seed)) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    state = torch.get_rng_state()
    list(generate(model, [1, 2], 3, temperature=1.0))
    assert torch.equal(torch.get_rng_state(), state)


def test_generation_records_no_graph_and_leaves_the_mode_as_it_was(config):
    model = model_of(config, "softmax")
    recorded = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: recorded.append(logits.requires_grad))
    tokens = generate(model, [1], 3)
    next(tokens)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    model(torch.tensor([[1, 2]])).sum().backward()
    assert len(list(tokens)) == 2
    assert recorded == [False, True, False, False]  # the second is the training in between


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
