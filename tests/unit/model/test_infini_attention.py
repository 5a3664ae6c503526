"""Infini-attention against a literal loop of the paper's equations, and what must hold of it whatever the weights."""

import pytest
import torch

from infini_llama.model.context import Context
from infini_llama.model.infini_attention import HeadMaps, InfiniAttention
from infini_llama.model.layout import Segments, segments
from infini_llama.model.llama import Llama
from infini_llama.model.memory import memories, retrieve, sigma
from support.differences import largest, relative
from support.literal_infini import literal_infini
from support.models import small

N = 8


def attention(**changes):
    """One layer's attention in fp64 with random weights and distinct gates."""
    layer = InfiniAttention(
        small(attention="infini", segment_length=N, **changes)
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3)
        layer.gate.normal_(0, 2)
    return layer


def layout(x, documents=None, **changes):
    """What a model would hand to its layers for x [B, T, hidden_size]."""
    config = small(attention="infini", segment_length=N, **changes)
    return segments(config, x.shape[:2], documents, x)


def assert_literal(layer, x, rows, **options):
    """Outputs and every gradient against the loop over tokens, heads and segments."""
    weights = torch.randn(x.shape, dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    output = layer(x, rows)
    gradients = torch.autograd.grad((output * weights).sum(), inputs, allow_unused=True)
    q, k, v = layer.project(x)
    if isinstance(layer.memory_q, HeadMaps):
        of_queries, of_keys = layer.memory_q, layer.memory_k
        maps = (of_queries.matrix, of_queries.shift, of_keys.matrix, of_keys.shift)
        options |= {"maps": maps}
    options |= {"sinks": layer.sinks}
    literal = layer.merge(
        literal_infini(q, k, v, layer.gate, N, 10_000.0, layer.update, **options)
    )
    expected = torch.autograd.grad((literal * weights).sum(), inputs, allow_unused=True)
    assert largest(output, literal) < 1e-9
    for gradient, other in zip(gradients, expected, strict=True):
        zero = torch.zeros(())
        assert (
            largest(
                zero if gradient is None else gradient, zero if other is None else other
            )
            < 1e-9
        )


MAPS = {"memory_maps": True}
BEFORE = {"attend_previous_segment": True}


@pytest.mark.parametrize("update", ["linear", "delta", "delta_bounded"])
@pytest.mark.parametrize(
    ("kv_heads", "length", "backend", "fields"),
    [
        *((2, length, "sdpa", {}) for length in (N - 1, N, N + 1, 2 * N, 7 * N)),
        *((kv_heads, 4 * N + 3, "sdpa", {}) for kv_heads in (4, 2, 1)),
        (4, 3 * N, "sdpa", MAPS),
        (2, 4 * N + 3, "sdpa", MAPS),
        (1, N, "sdpa", MAPS),
        *((2, N + 1, backend, BEFORE) for backend in ("sdpa", "blocked")),
        *((2, 2 * N, backend, BEFORE | MAPS) for backend in ("sdpa", "blocked")),
        *((4, 3 * N - 1, backend, BEFORE) for backend in ("sdpa", "blocked")),
        *((1, 5 * N + 3, backend, BEFORE | MAPS) for backend in ("sdpa", "blocked")),
    ],
)
def test_equals_the_paper_literally(update, kv_heads, length, backend, fields):
    layer = attention(num_key_value_heads=kv_heads, memory_update=update, **fields)
    layer.backend = backend
    x = torch.randn(2, length, 32, dtype=torch.float64, requires_grad=True)
    assert_literal(layer, x, layout(x, **fields))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("update", ["linear", "delta", "delta_bounded"])
def test_maps_are_the_identity_at_first_bit_for_bit(update, autocast):
    settings = {
        "attention": "infini",
        "memory_update": update,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(3)
    plain = Llama(small(**settings))
    torch.manual_seed(3)
    mapped = Llama(small(**settings, memory_maps=True))
    plain.set_gates([0.5, [0.3, -1.0, 0.0, 2.0]])
    mapped.set_gates([0.5, [0.3, -1.0, 0.0, 2.0]])
    state = mapped.state_dict()
    assert all(
        torch.equal(state[name], weight) for name, weight in plain.state_dict().items()
    )
    ids = torch.randint(0, 97, (2, 5 * N + 3))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert torch.equal(mapped(ids), plain(ids))
        with torch.inference_mode():
            (found, states), (expected, others) = (
                model.prefill(ids[:, : 2 * N + 1], capacity=0)
                for model in (mapped, plain)
            )
            assert torch.equal(found, expected)
            for position in range(2 * N + 1, 3 * N + 2):
                token = ids[:, position]
                assert torch.equal(
                    mapped.decode(token, states), plain.decode(token, others)
                )


def test_maps_have_gradients_through_the_memory_alone():
    """Whatever they are, local attention does not change; and one segment gives them none."""
    model = Llama(small(attention="infini", segment_length=N, memory_maps=True))
    of_memory = {name: p for name, p in model.named_parameters() if ".memory_" in name}
    assert len(of_memory) == 2 * 4
    ids = torch.randint(0, 97, (2, 3 * N))
    model.loss(ids[:, :N], ids[:, :N])[0].backward()
    assert all(p.grad is None for p in of_memory.values())
    model.loss(ids, ids)[0].backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in of_memory.values()
    )
    before, one_segment = model(ids), model(ids[:, :N])
    model.use_memory(False)
    local = model(ids)
    with torch.no_grad():
        for parameter in of_memory.values():
            parameter.normal_()
    assert torch.equal(model(ids), local) and torch.equal(
        model(ids[:, :N]), one_segment
    )
    model.use_memory(True)
    assert not torch.equal(model(ids), before)


@pytest.mark.parametrize("update", ["linear", "delta_bounded"])
def test_write_jitter_scales_the_writes_of_each_segment_in_training_only(update):
    plain, layer = (attention(memory_update=update) for _ in range(2))
    layer.load_state_dict(plain.state_dict())
    layer.set_write_jitter(32.0)
    x = torch.randn(2, 4 * N + 3, 32, dtype=torch.float64)
    assert torch.equal(layer.eval()(x, layout(x)), plain(x, layout(x)))
    torch.manual_seed(1)
    found = layer.train()(x, layout(x))
    torch.manual_seed(1)
    factors = 32.0 ** torch.rand(2, 5, 1, dtype=torch.float64)
    assert factors.min() < 2 < 8 < factors.max()
    scaled = Segments(layout(x).rotary, writes=factors.expand(-1, -1, N))
    q, k, v = plain.project(x)
    # The range is in fp32.
    assert largest(found, plain.merge(plain.attend(q, k, v, scaled)[0])) < 1e-6
    assert largest(found, plain(x, layout(x))) > 1e-3


PACKED = {  # each of the two rows: how many tokens of which document
    "one document a row": [[(0, 40)], [(5, 40)]],
    "a document ends with a segment": [
        [(0, N), (1, 2 * N), (2, 2 * N)],
        [(0, 3 * N), (1, 2 * N)],
    ],
    "documents end inside segments": [
        [(0, 3), (1, 22), (2, 15)],
        [(0, 29), (1, 1), (2, 10)],
    ],
    "many short documents": [[(i, 4) for i in range(10)], [(i, 5) for i in range(8)]],
    "padding at the end": [[(0, 21), (-1, 19)], [(0, 10), (1, 13), (-1, 17)]],
    "padding at the beginning": [[(-1, 5), (0, 35)], [(-1, 12), (3, 20), (1, 8)]],
    "padding alone": [[(-1, 40)], [(0, 40)]],
    "a document ends before a segment": [
        [(0, N - 2), (1, 34)],
        [(0, 2 * N - 3), (1, 27)],
    ],
    "padding between": [[(0, 11), (-1, 3), (1, 26)], [(-1, N - 1), (1, 33)]],
}


def numbers(row):
    return [document for document, length in row for _ in range(length)]


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    ("update", "backend", "fields"),
    [
        *((update, "sdpa", {}) for update in ("linear", "delta", "delta_bounded")),
        *((update, "sdpa", MAPS) for update in ("linear", "delta", "delta_bounded")),
        ("linear", "sdpa", BEFORE),
        ("delta_bounded", "blocked", BEFORE),
    ],
)
def test_packed_documents_equal_the_paper_literally(name, update, backend, fields):
    layer = attention(num_key_value_heads=1, memory_update=update, **fields)
    layer.backend = backend
    documents = torch.tensor([numbers(row) for row in PACKED[name]])
    x = torch.randn(2, 40, 32, dtype=torch.float64, requires_grad=True)
    assert_literal(layer, x, layout(x, documents, **fields), documents=documents)


@pytest.mark.parametrize("length", [1, N - 1, N])
@pytest.mark.parametrize("backend", ["sdpa", "blocked"])
@pytest.mark.parametrize(
    "fields", [{}, BEFORE], ids=["its own segment", "the segment before"]
)
def test_one_segment_is_bitwise_plain_causal_attention(length, backend, fields):
    infini = Llama(small(attention="infini", segment_length=N, **fields), backend)
    plain = Llama(small(attention="softmax"), backend)
    infini.load_state_dict(plain.state_dict(), strict=False)
    infini.set_gates([3.0, 3.0])
    ids, labels = torch.randint(0, 97, (3, length)), torch.randint(0, 97, (3, length))
    documents = torch.tensor([[0] * length, [1] * length, [*range(length)]])
    assert torch.equal(infini(ids), plain(ids))
    torch.testing.assert_close(infini(ids, documents), plain(ids, documents))
    with torch.inference_mode():
        assert torch.equal(infini.prefill(ids, 0)[0], plain.prefill(ids, length)[0])
    for model in (infini, plain):
        model.loss(ids, labels)[0].backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(infini.get_parameter(name).grad, parameter.grad), name


def test_two_segments_that_see_each_other_are_plain_attention():
    """So a text that is no longer has the outputs of the model that it was made from."""
    sees = Llama(small(attention="infini", segment_length=N, **BEFORE)).double()
    plain = Llama(small(attention="softmax")).double()
    sees.load_state_dict(plain.state_dict(), strict=False)
    ids = torch.randint(0, 97, (2, 2 * N))
    assert relative(sees(ids), plain(ids)) < 1e-9
    longer = torch.randint(0, 97, (2, 3 * N))
    assert relative(sees(longer), plain(longer)) > 1e-3


def test_with_the_memory_off_or_local_each_layer_carries_a_token_across_one_boundary():
    """The first tokens, which all see, are carried anywhere."""
    model = Llama(small(attention="infini", segment_length=N, **BEFORE)).double()
    model.use_memory(False)
    local = Llama(small(attention="local", segment_length=N, **BEFORE)).double()
    state = {
        name: x for name, x in model.state_dict().items() if not name.endswith(".gate")
    }
    local.load_state_dict(state)
    ids = torch.randint(1, 97, (1, 6 * N))
    assert torch.equal(model(ids), local(ids))
    for edited, last in ((N + 2, 4 * N), (2 * N + 2, 5 * N), (1, 6 * N)):
        other = ids.clone()
        other[0, edited] = 0
        changed = (model(ids) != model(other)).any(dim=2)[0]
        assert not changed[:edited].any() and not changed[last:].any()
        assert changed[edited:last].all()


def test_a_context_is_refused_where_segments_see_the_one_before():
    model = Llama(small(attention="infini", **BEFORE))
    with pytest.raises(ValueError, match="attend_previous_segment"):
        model(torch.randint(0, 97, (1, 32)), None, Context(None, 0, 2))  # type: ignore[arg-type]


def test_a_short_first_segment_makes_delta_diverge_and_not_delta_bounded():
    """After a reset a few tokens' keys are a small z, by which the paper divides the next segment's."""
    sizes = {}
    for update in ("delta", "delta_bounded"):
        k = torch.randn(1, 2, 1, 64, 16, dtype=torch.float64)
        writes = torch.ones(1, 2, 64, dtype=torch.bool)
        writes[:, 0, 3:] = False
        v = torch.randn(1, 2, 1, 64, 16, dtype=torch.float64)
        M, _ = memories(k, v, update, writes=writes)
        linear, _ = memories(k, v, "linear", writes=writes)
        sizes[update] = (M[:, 1].norm() / linear[:, 1].norm()).item()
    assert sizes["delta"] > 2 and sizes["delta_bounded"] < 1.5


@pytest.mark.parametrize("update", ["linear", "delta", "delta_bounded"])
@pytest.mark.parametrize("count", [16, 256])
def test_the_memory_survives_bf16_autocast(count, update):
    """Sums over many segments stay in fp32: only the rounding of the layer's bf16 inputs and outputs remains."""
    layer = attention(memory_update=update)
    torch.nn.init.constant_(layer.gate, 100.0)
    x = torch.randn(1, count * N, 32).bfloat16()
    exact = layer(x.double(), layout(x.double()))[:, -N:]
    layer.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x, layout(x))[:, -N:]
        _, k, v = layer.project(x)
    assert output.dtype == torch.bfloat16
    assert relative(output, exact) < 1e-2
    k, v = (part.unflatten(2, (count, N)).transpose(1, 2) for part in (k, v))
    M, z = memories(k, v, update)
    exact_M, exact_z = memories(k.double(), v.double(), update)
    assert k.dtype == torch.bfloat16 and M.dtype == z.dtype == torch.float32
    assert relative(M, exact_M) < 1e-5
    assert relative(z, exact_z) < 1e-5


def test_a_memory_that_nothing_was_written_to_reads_as_zero():
    q, nothing = torch.randn(1, 2, 3, 4), torch.zeros(1, 2, 4, 4)
    assert torch.equal(retrieve(q, nothing, nothing[..., 0]), torch.zeros(1, 2, 3, 4))
    hardly = torch.full((1, 2, 3, 4), -200.0)  # sigma is exactly zero there
    assert retrieve(hardly, nothing + 1, nothing[..., 0] + 1).isfinite().all()


def test_the_feature_map_is_exact_in_value_and_gradient():
    """ELU(x) + 1 in fp32 has no digit left below -17; large x must not overflow in the branch that is not taken."""
    x = torch.tensor(
        [-80.0, -60.0, -30.0, -17.5, -13.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 100.0, 3e38],
        requires_grad=True,
    )
    y = sigma(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    wide = x.detach().double()
    expected = torch.where(wide > 0, wide + 1, wide.exp())
    assert ((y.double() - expected) / expected).abs().max() < 3e-7
    assert (
        (gradient.double() - wide.clamp(max=0).exp()) / wide.clamp(max=0).exp()
    ).abs().max() < 3e-7
    assert torch.autograd.gradcheck(
        sigma, torch.linspace(-5, 5, 20, dtype=torch.float64, requires_grad=True)
    )


def test_infini_without_memory_equals_local_attention():
    infini, local = (
        Llama(small(attention=kind, segment_length=N)) for kind in ("infini", "local")
    )
    local.load_state_dict(
        {
            name: value
            for name, value in infini.state_dict().items()
            if not name.endswith(".gate")
        }
    )
    ids = torch.randint(0, 97, (2, 4 * N + 3))
    with torch.inference_mode():
        with_memory = infini(ids)
        infini.use_memory(False)
        assert torch.equal(infini(ids), local(ids)) and not torch.equal(
            infini(ids), with_memory
        )
        logits, states = infini.prefill(ids[:, : 2 * N + 1], capacity=0)
        assert relative(logits, local(ids)[:, 2 * N]) < 1e-5
        assert (
            relative(infini.decode(ids[:, 2 * N + 1], states), local(ids)[:, 2 * N + 1])
            < 1e-5
        )
        infini.use_memory(True)
        assert torch.equal(infini(ids), with_memory)
        local.use_memory(True)  # it has none
        local(ids)


def test_layers_without_a_memory_equal_closed_gates():
    """Exactly, in value and gradient; and a layer below the first memory does not depend on earlier segments."""
    every, one = (
        Llama(small(attention="infini", segment_length=N, memory_layers=layers))
        for layers in (None, [1])
    )
    every.set_gates([float("-inf"), [0.3, -1.0, 0.0, 2.0]])
    state = every.state_dict()
    one.load_state_dict({name: state[name] for name in one.state_dict()})
    assert state.keys() - one.state_dict().keys() == {"model.layers.0.self_attn.gate"}
    ids = torch.randint(0, 97, (2, 3 * N + 3))
    for model in (every, one):
        model.loss(ids, ids)[0].backward()
    assert torch.equal(every(ids), one(ids))
    expected = dict(every.named_parameters())
    assert all(
        torch.equal(parameter.grad, expected[name].grad)
        for name, parameter in one.named_parameters()
    )


def test_local_attention_sees_its_own_segment_only():
    model = Llama(small(attention="local", segment_length=N)).double()
    ids = torch.randint(0, 97, (1, 3 * N))
    for s in range(3):
        assert (
            largest(
                model(ids)[:, s * N : (s + 1) * N], model(ids[:, s * N : (s + 1) * N])
            )
            < 1e-12
        )
