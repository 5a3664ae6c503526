"""Generation from state against the full forward, and the choice of tokens."""

import pytest
import torch

from infini_llama.model.generate import Sampling, generate_batch, keep_likely
from infini_llama.model.infini_attention import InfiniAttention
from infini_llama.model.llama import Llama
from infini_llama.model.segment_states import InfiniState
from support.differences import relative
from support.models import generate, small

N = 8


def model_of(attention, **changes):
    model = Llama(small(attention=attention, segment_length=N, **changes))
    for name, parameter in model.named_parameters():
        if name.endswith(".gate"):
            torch.nn.init.normal_(parameter, 0, 2)
        if ".memory_" in name:
            torch.nn.init.normal_(parameter, 0, 0.5)
    return model


MODELS = {
    "softmax": {"attention": "softmax"},
    "post-norm": {"attention": "softmax", "pre_norm": False, "qk_norm": True},
    "local": {"attention": "local"},
    "linear": {"attention": "infini"},
    "delta": {"attention": "infini", "memory_update": "delta"},
    "delta_bounded": {
        "attention": "infini",
        "memory_update": "delta_bounded",
        "qk_norm": True,
    },
    "wide heads": {"attention": "infini", "head_dim": 14},
    "memory in one layer": {"attention": "infini", "memory_layers": [1]},
    "maps": {"attention": "infini", "memory_maps": True},
    "local, the one before": {"attention": "local", "attend_previous_segment": True},
    "the one before": {"attention": "infini", "attend_previous_segment": True},
    "the one before, delta_bounded": {
        "attention": "infini",
        "memory_update": "delta_bounded",
        "memory_maps": True,
        "qk_norm": True,
        "attend_previous_segment": True,
    },
    "the one before, memory in one layer": {
        "attention": "infini",
        "memory_layers": [1],
        "attend_previous_segment": True,
    },
    "maps, delta_bounded": {
        "attention": "infini",
        "memory_update": "delta_bounded",
        "memory_maps": True,
    },
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("kv_heads", "length"),
    [(2, N - 1), (2, N), (2, N + 1), (4, 3 * N + 7), (1, 3 * N + 7)],
)
@torch.inference_mode()
def test_prefill_and_decode_equal_the_full_forward(kind, kv_heads, length):
    model = model_of(**MODELS[kind], num_key_value_heads=kv_heads)
    ids = torch.randint(0, 97, (2, length + 2 * N + 1))
    full = model(ids)
    logits, states = model.prefill(ids[:, :length], capacity=ids.shape[1])
    assert relative(logits, full[:, length - 1]) < 1e-5
    for position in range(length, ids.shape[1]):
        logits = model.decode(ids[:, position], states)
        assert relative(logits, full[:, position]) < 1e-5, position


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_hidden_layers": 5, "memory_layers": (1, 3)},
        {
            "num_hidden_layers": 5,
            "memory_layers": (1, 3),
            "attend_previous_segment": True,
        },
    ],
)
@pytest.mark.parametrize("uses_memory", [True, False])
@torch.inference_mode()
def test_a_long_prompt_is_read_in_pieces(monkeypatch, fields, uses_memory):
    model, read = model_of("infini", **fields), list[int]()
    model.use_memory(uses_memory)
    monkeypatch.setattr("infini_llama.model.llama.PIECE", 4 * N)
    model.model.embed_tokens.register_forward_hook(
        lambda _module, ids, _output: read.append(ids[0].numel() // 2)
    )
    ids = torch.randint(0, 97, (2, 30 * N + 3))
    logits, states = model.prefill(ids, capacity=0)
    sees = (5 + 1) * N if "attend_previous_segment" in fields else 0
    assert max(read) <= 4 * N and sum(read) == (30 * N if uses_memory else sees) + 3
    assert relative(logits, model(ids)[:, -1]) < 1e-5
    longer = torch.cat((ids, torch.randint(0, 97, (2, N))), dim=1)
    assert (
        relative(
            model.read(longer[:, ids.shape[1] :], states),
            model.hidden(longer)[:, ids.shape[1] :],
        )
        < 1e-5
    )


def test_prompts_of_several_lengths_are_read_in_pieces_and_without_padding(monkeypatch):
    model, read = model_of("infini"), list[int]()
    monkeypatch.setattr("infini_llama.model.llama.PIECE", 4 * N)
    model.model.embed_tokens.register_forward_hook(
        lambda _module, ids, _output: read.append(ids[0].numel())
    )
    lengths = (30 * N + 3, 1, 2 * N)
    next(generate_batch(model, [[1] * length for length in lengths], 1, Sampling()))
    assert max(read) <= 4 * N and sum(read) == sum(lengths)


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_padded_rows_equal_the_rows_by_themselves(kind):
    model = model_of(**MODELS[kind])
    lengths = [1, N - 1, N, N + 1, 2 * N, 3 * N + 7]
    ids = torch.randint(0, 97, (len(lengths), 6 * N))
    full, longest, rows = model(ids), max(lengths), torch.arange(len(lengths))
    states = model.new_states(len(lengths), 6 * N)
    logits = model.logits(
        model.read(ids[:, :longest], states, lengths)[rows, torch.tensor(lengths) - 1]
    )
    for step in range(2 * N + 1):
        places = torch.tensor(lengths) + step
        assert relative(logits, full[rows, places - 1]) < 1e-5, step
        logits = model.decode(ids[rows, places], states)


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_rows_that_were_read_one_by_one_are_decoded_together(kind):
    model = model_of(**MODELS[kind])
    lengths = torch.tensor([1, N, N + 3, 2 * N + 5, 4 * N])
    rows = torch.arange(len(lengths))
    ids = torch.randint(0, 97, (len(lengths), 7 * N))
    full, states = model(ids), model.new_states(len(lengths), 7 * N)
    for row, length in enumerate(lengths.tolist()):
        _, read = model.prefill(ids[row : row + 1, :length], capacity=length)
        for state, of_row in zip(states.layers, read.layers, strict=True):
            state.set_row(row, of_row)
    for step in range(2 * N + 1):
        logits = model.decode(ids[rows, lengths + step], states)
        assert relative(logits, full[rows, lengths + step]) < 1e-5, step


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_a_text_read_in_pieces_is_read_as_a_whole(kind):
    model = model_of(**MODELS[kind])
    ids = torch.randint(0, 97, (2, 80))
    states = model.new_states(2, capacity=80)
    pieces = [
        model.read(piece, states)
        for piece in ids.split([3, 5, 1, 20, N, 2 * N, 11, 80 - 40 - 3 * N], dim=1)
    ]
    assert relative(torch.cat(pieces, dim=1), model.hidden(ids)) < 1e-5


class Integers(torch.nn.Module):
    """A linear layer whose weight is kept in 8 bits, as other programs put in its place."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.abs().max() / 127
        rounded = (linear.weight / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(rounded, requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).T


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_layers_of_integers_continue_a_text(kind):
    model = model_of(**MODELS[kind])
    for layer in model.model.layers:
        for name, part in [*layer.self_attn.named_children()]:
            if isinstance(part, torch.nn.Linear):
                setattr(layer.self_attn, name, Integers(part))
    ids = torch.randint(0, 97, (2, 4 * N))
    states = model.new_states(2, capacity=4 * N)
    pieces = [model.read(piece, states) for piece in ids.split(N + 3, dim=1)]
    assert relative(torch.cat(pieces, dim=1), model.hidden(ids)) < 1e-5


@torch.inference_mode()
def test_unreadable_input_is_refused():
    softmax, infini = model_of("softmax"), model_of("infini")
    _, states = softmax.prefill(torch.tensor([[1, 2, 3]]), capacity=4)
    softmax.decode(torch.tensor([1]), states)
    with pytest.raises(ValueError, match="4"):
        softmax.decode(torch.tensor([1]), states)
    states = infini.new_states(2, capacity=4)
    infini.read(torch.tensor([[1, 2, 3], [1, 2, 0]]), states, lengths=[3, 2])
    with pytest.raises(ValueError, match="token"):
        infini.read(torch.tensor([[1, 2], [1, 2]]), states)


@torch.inference_mode()
def test_the_state_of_infini_does_not_grow():
    model = model_of("infini")
    storages = set()
    for length in (1, N, 5 * N + 3, 50 * N):
        _, states = model.prefill(torch.randint(0, 97, (1, length)), capacity=10_000)
        for _ in range(2 * N + 1):
            model.decode(torch.tensor([3]), states)
            storages.add(_storage_of(states))
    heads, size = 2, 8
    # Keys, rotated and not, and values; M, z.
    per_layer = 4 * heads * (3 * N * size + size * size + size)
    assert storages == {2 * per_layer}  # and no view that keeps a larger tensor alive


@pytest.mark.parametrize("turned_off", [False, True])
@torch.inference_mode()
def test_a_state_without_memory_has_keys_and_values_only(turned_off):
    model = model_of("infini" if turned_off else "local")
    model.use_memory(False)
    _, states = model.prefill(torch.randint(0, 97, (3, 2 * N + 1)), capacity=10_000)
    heads, size, layers = 2, 8, 2
    assert _storage_of(states) == layers * 3 * 4 * heads * 2 * N * size


@torch.inference_mode()
def test_decoding_in_bf16_keeps_the_memory_in_fp32():
    """64 segments, token by token: rounding of the inputs stays, rounding of the sums would pile up."""
    model = model_of("infini", num_hidden_layers=1, initializer_range=0.1)
    layer = model.get_submodule("model.layers.0.self_attn")
    assert isinstance(layer, InfiniAttention)
    ids = torch.randint(0, 97, (1, 64 * N))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, states = model.prefill(ids[:, :3], capacity=ids.shape[1])
        for position in range(3, ids.shape[1]):
            model.decode(ids[:, position], states)
        _, k, v = layer.project(
            model.model.layers[0].get_submodule("input_layernorm")(
                model.model.embed_tokens(ids)
            )
        )
    assert isinstance(state := states.layers[0], InfiniState)
    features = torch.nn.functional.elu(k.double()) + 1
    assert (
        k.dtype == torch.bfloat16
        and state.memory.M.dtype == state.memory.z.dtype == torch.float32
    )
    assert relative(state.memory.M, features.transpose(-1, -2) @ v.double()) < 1e-5
    assert relative(state.memory.z, features.sum(dim=2)) < 1e-5


def _storage_of(states):
    return sum(
        _storage(value) for state in states.layers for value in vars(state).values()
    )


def _storage(value):
    if isinstance(value, tuple):
        return sum(map(_storage, value))
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


@pytest.mark.parametrize("attention", ["softmax", "infini"])
def test_greedy_text_is_what_the_full_forward_would_choose(attention):
    model = model_of(attention)
    # Longer than a segment: all of it must be read.
    prompt = torch.randint(0, 97, (3 * N + 2,)).tolist()
    text = list(prompt)
    for _ in range(2 * N):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    new = text[len(prompt) :]
    assert generate(model, prompt, 2 * N) == new
    for stop in set(new):
        assert generate(model, prompt, 2 * N, stop_id=stop) == new[: new.index(stop)]
    assert generate(model, prompt, 0) == []


def test_sampling_leaves_the_global_generator_as_it_was():
    model = model_of("infini")
    state = torch.get_rng_state()
    generate(model, [1, 2], 3, Sampling(temperature=1.0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [("softmax", 0.0), ("linear", 0.0), *((kind, 1.0) for kind in MODELS)],
)
def test_a_batched_row_equals_the_row_by_itself(kind, temperature):
    model = model_of(**MODELS[kind]).double()
    prompts = [torch.randint(0, 97, (length,)).tolist() for length in (1, N, 2 * N + 5)]
    sampling = Sampling(temperature=temperature, repetition_penalty=1.2, seed=7)
    single = [generate(model, prompt, 2 * N + 3, sampling) for prompt in prompts]
    steps = list(generate_batch(model, prompts, 2 * N + 3, sampling))
    assert [list(row) for row in zip(*steps, strict=True)] == single


def test_each_row_ends_independently():
    model = model_of("infini")
    prompts, calls = [[1, 2, 3], [4], [5, 6]], []

    def ends(row, token):
        calls.append((row, token))
        return sum(called == row for called, _ in calls) == (2, 5, 3)[row]

    steps = list(generate_batch(model, prompts, 100, Sampling(temperature=1.0), ends))
    assert [[token is not None for token in step] for step in steps] == [
        [True, True, True],
        [True, True, True],
        [False, True, True],
        [False, True, False],
        [False, True, False],
    ]
    assert [token for step in steps for token in step if token is not None] == [
        token for _, token in calls
    ]


def test_samples_of_a_prompt_differ_and_the_first_is_that_of_one():
    model = model_of("softmax")
    sampling = Sampling(temperature=1.0, seed=3)
    rows = list(zip(*generate_batch(model, [[1], [2], [1]], 20, sampling), strict=True))
    assert list(rows[0]) == generate(model, [1], 20, sampling) and rows[0] != rows[2]
    assert list(rows[2]) == generate(model, [1], 20, Sampling(temperature=1.0, seed=4))


def test_generation_records_no_graph_and_leaves_the_mode_as_it_was():
    model = model_of("softmax")
    recorded = []
    model.lm_head.register_forward_hook(
        lambda _module, _inputs, logits: recorded.append(logits.requires_grad)
    )
    tokens = generate_batch(model, [[1]], 3, Sampling())
    next(tokens)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    model(torch.tensor([[1, 2]])).sum().backward()
    assert len(list(tokens)) == 2
    # The second is the training in between.
    assert recorded == [
        False,
        True,
        False,
        False,
    ]


def test_the_likeliest_token_stays_whatever_share_is_kept():
    logits = torch.randn(20)
    for kept in (
        {"top_p": 1e-300},
        {"top_p": 1e-9, "min_p": 1.0},
        {"top_k": 1, "top_p": 1e-50},
    ):
        assert keep_likely(logits, **kept).isfinite().nonzero().tolist() == [
            [int(logits.argmax())]
        ]


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_an_empty_prompt_is_refused(prompts):
    with pytest.raises(ValueError, match="prompt"):
        next(generate_batch(model_of("softmax"), prompts, 1, Sampling()))
