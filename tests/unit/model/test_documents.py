"""Packed documents: each equals the document by itself, on every path that computes it."""

import importlib.util

import pytest
import torch

from infini_llama.model import backends, blocked, layout, loss
from infini_llama.model.backends import causal_attention
from infini_llama.model.layout import PADDING, positions
from infini_llama.model.llama import Llama
from support.differences import largest, relative
from support.models import small

N = 8
ROW = [0] * 13 + [1] * 20 + [2] * 3 + [3] * 9
KINDS = {
    "softmax": {"attention": "softmax"},
    "linear": {"attention": "infini"},
    "delta": {"attention": "infini", "memory_update": "delta"},
    "delta_bounded": {"attention": "infini", "memory_update": "delta_bounded"},
    "local": {"attention": "local"},
    "the segment before": {"attention": "infini", "attend_previous_segment": True},
}


def model_of(kind):
    model = Llama(small(segment_length=N, rope_theta=100.0, **KINDS[kind])).double()
    for name, parameter in model.named_parameters():
        if name.endswith(".gate"):
            torch.nn.init.normal_(parameter, 0, 2)
    return model


@pytest.fixture(params=["document by document", "mask"])
def way(request, monkeypatch):
    """Both ways of a CPU."""
    monkeypatch.setattr(
        backends, "LONG", 0 if request.param == "document by document" else 10**9
    )


def test_positions_restart_per_document():
    documents = torch.tensor(
        [[4, 4, 4, 2, 2, 7, PADDING, PADDING], [0, 0, 0, 0, 0, 0, 0, 0]]
    )
    assert positions(documents).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], list(range(8))]


@pytest.mark.usefixtures("way")
def test_softmax_of_packed_documents_equals_each_document_by_itself():
    model = model_of("softmax")
    ids, documents = torch.randint(0, 97, (2, 45)), torch.tensor([ROW, ROW[::-1]])
    labels = torch.randint(0, 97, (2, 45))
    packed = model(ids, documents)
    for row in range(2):
        for document in range(4):
            single = documents[row] == document
            assert (
                largest(packed[row, single], model(ids[row : row + 1, single])[0])
                < 1e-12
            )
    model.loss(ids, labels, documents)[0].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for row in range(2):
        for document in range(4):
            single = documents[row] == document
            model.loss(ids[row : row + 1, single], labels[row : row + 1, single])[
                0
            ].backward()
    for name, parameter in model.named_parameters():
        packed, single = gradients[name], parameter.grad
        assert (
            packed is not None
            and single is not None
            and relative(packed, single) < 1e-11
        ), name


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edited", range(4))
def test_an_edited_document_changes_nothing_in_the_others(kind, edited):
    """Neither the outputs, bit for bit, nor by their losses the gradients of its embeddings."""
    model, documents = model_of(kind), torch.tensor([ROW])
    first = ROW.index(edited)
    before = torch.randint(1, 97, (1, 45))  # token 0 is only in the edited document
    after = before.clone()
    after[0, first] = 0
    changed = (model(before, documents) != model(after, documents)).any(dim=2)[0]
    assert not changed[documents[0] != edited].any()
    reached = ROW.count(edited) if kind != "local" else 1
    assert changed[first : first + reached].all()
    labels = torch.where(documents != edited, before, -100)
    model.loss(after, labels, documents)[0].backward()
    gradient = model.model.embed_tokens.weight.grad
    assert (
        gradient is not None
        and (gradient[0] == 0).all()
        and gradient.abs().max() > 1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    """Neither where it stands at the end, nor, for the memory, inside a segment between a document's tokens."""
    model = model_of(kind)
    ids = torch.randint(0, 97, (1, 5 * N + 3))
    single = model(ids)
    for padding in (0, 1, N - 3, 2 * N):
        more = torch.nn.functional.pad(ids, (0, padding), value=5)
        documents = torch.tensor([[0] * ids.shape[1] + [PADDING] * padding])
        assert relative(model(more, documents)[:, : ids.shape[1]], single) < 1e-12


@pytest.mark.usefixtures("way")
def test_attention_dropout_applies_in_training_only():
    model = Llama(small(attention_dropout=0.5))
    ids, documents = torch.randint(0, 97, (1, 45)), torch.tensor([ROW])
    for arguments in ((ids,), (ids, documents)):
        model.train()
        assert not torch.equal(model(*arguments), model(*arguments))
        model.eval()
        assert torch.equal(model(*arguments), model(*arguments))


@pytest.mark.parametrize("attention", ["softmax", "infini"])
def test_residual_dropout_applies_in_training_only(attention):
    model, ids = (
        Llama(small(attention=attention, hidden_dropout=0.5)),
        torch.randint(0, 97, (1, 45)),
    )
    assert not torch.equal(model.train()(ids), model(ids))
    torch.manual_seed(5)
    first = model(ids)
    torch.manual_seed(5)
    assert torch.equal(model(ids), first)
    assert torch.equal(model.eval()(ids), model(ids))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("length", [5, 128, 300])
def test_blocks_of_queries_equal_sdpa(packed, heads, kv_heads, length, keep):
    """With weights that are kept, and that are computed again."""
    q, k, v = (
        torch.randn(2, h, length, 16, dtype=torch.float64, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    third = [0] * (length // 3)
    rows = [
        third + [1] * 3 + [2] * (length - len(third) - 3),
        [5] * (length - 1) + [PADDING],
    ]
    documents = torch.tensor(rows) if packed else None
    weights = torch.randn(2, heads, length, 16, dtype=torch.float64)
    found = causal_attention(q, k, v, documents, "blocked", keep_weights=keep)
    expected = causal_attention(q, k, v, documents)
    assert largest(found, expected) < 1e-12
    gradients = [
        torch.autograd.grad((output * weights).sum(), (q, k, v))
        for output in (found, expected)
    ]
    for gradient, other in zip(*gradients, strict=True):
        assert largest(gradient, other) < 1e-11


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    "earlier", [None, [[69, 69, 69], [5, 0, 0]], [[0, 0, 0], [65, 0, 0]]]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (1, 1)])
def test_blocks_of_queries_that_see_earlier_tokens_equal_sdpa(
    heads, kv_heads, earlier, keep
):
    """Of 69 tokens before, each document sees the last ones, or without documents all see all."""
    size = (20, 70, 40)
    q, k, v = (
        torch.randn(2, h, length, 16, dtype=torch.float64, requires_grad=True)
        for h, length in ((heads, 130), (kv_heads, 199), (kv_heads, 199))
    )
    rows = [
        [
            number
            for number, length in zip(numbers, size, strict=True)
            for _ in range(length)
        ]
        for numbers in (((0, 0, 0), (5, 6, PADDING)), earlier or ())
        for numbers in numbers
    ]
    documents = torch.tensor(rows[:2]) if earlier else None
    seen = torch.tensor(rows[2:]) if earlier else None
    weights = torch.randn(2, heads, 130, 16, dtype=torch.float64)
    found = causal_attention(
        q, k, v, documents, "blocked", keep_weights=keep, earlier=seen
    )
    expected = causal_attention(q, k, v, documents, earlier=seen)
    every = k.repeat_interleave(heads // kv_heads, 1)
    scores = (q @ every.mT / 4).masked_fill(
        torch.arange(199) > 69 + torch.arange(130)[:, None], -torch.inf
    )
    if earlier is None:
        plain = scores.softmax(-1) @ v.repeat_interleave(heads // kv_heads, 1)
        assert largest(expected, plain) < 1e-12
    assert largest(found, expected) < 1e-12
    gradients = [
        torch.autograd.grad((output * weights).sum(), (q, k, v))
        for output in (found, expected)
    ]
    for gradient, other in zip(*gradients, strict=True):
        assert largest(gradient, other) < 1e-11


def test_flash_attention_refuses_earlier_tokens():
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="attend_previous_segment"):
        causal_attention(q, k, k, backend="flash2")


@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        (6, [[row] * 250 for row in range(8)]),
        (2, [[0, 1, 2, 2, 2, 2, 2, 2]]),
        (1, [[*range(16)]]),
    ],
    ids=["a document fills each row", "few tokens", "a token each"],
)
def test_kept_weights_have_room_for_the_alignment_of_each_document(heads, rows):
    documents = torch.tensor(rows)
    q = torch.randn(len(rows), heads, documents.shape[1], 8, requires_grad=True)
    assert (
        relative(
            causal_attention(q, q, q, documents, "blocked"),
            causal_attention(q, q, q, documents),
        )
        < 1e-6
    )


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_of_queries_have_the_same_bits_every_time(packed):
    """Whether their weights are kept for the backward pass, or computed again."""
    q, k, v, weights = (
        torch.randn(2, h, 301, 32, requires_grad=True) for h in (4, 2, 2, 4)
    )
    documents = torch.tensor([[0] * 200 + [1] * 101, [2] * 301]) if packed else None
    outputs = [
        causal_attention(q, k, v, documents, "blocked", keep_weights=keep)
        for keep in (True, True, False)
    ]
    gradients = [
        torch.autograd.grad((output * weights).sum(), (q, k, v)) for output in outputs
    ]
    with torch.no_grad():
        outputs.append(causal_attention(q, k, v, documents, "blocked"))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert all(
        torch.equal(one, other)
        for again in gradients[1:]
        for one, other in zip(gradients[0], again, strict=True)
    )


def test_blocks_of_queries_are_operators_that_can_be_compiled():
    q, k, v = (
        torch.randn(2, 140, heads, 16, requires_grad=True) for heads in (4, 2, 2)
    )
    weights = blocked.attend(q, k, v, None, None, True)[1]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        blocked.attend, (q, k, v, None, None, True), test_utils=checks
    )
    q, k, v = q.detach(), k.detach(), v.detach()
    documents = torch.zeros(2, 140).long()
    torch.library.opcheck(
        blocked.attend, (q, k, v, documents, None, False), test_utils=checks
    )
    torch.library.opcheck(
        blocked.gradients, (q, q, k, v, None, None, weights), test_utils=checks
    )
    torch.library.opcheck(
        blocked.gradients, (q, q, k, v, documents, None, weights[:0]), test_utils=checks
    )
    q = q[:, :60].contiguous()
    documents = documents[:, :60]
    torch.library.opcheck(
        blocked.attend, (q, k, v, documents, documents + 9, True), test_utils=checks
    )
    torch.library.opcheck(
        blocked.gradients,
        (q, q, k, v, documents, documents + 9, weights[:0]),
        test_utils=checks,
    )


@pytest.mark.parametrize(
    ("module", "operators"),
    [(blocked, ("attend", "gradients")), (loss, ("loss_and_gradients",))],
)
def test_a_copy_of_the_code_does_not_replace_the_operators(module, operators):
    """As the code that an exported model carries: torch frees an operator whose name is defined again, while it is still called."""
    spec = importlib.util.spec_from_file_location(
        "transformers_modules.out.copy", module.__file__
    )
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for name in operators:
        original, other = (
            str(getattr(one, name)._opoverload) for one in (module, copy)
        )
        assert original.startswith("infini_llama_model_") and other.startswith(
            "transformers_modules_out_copy."
        )


@pytest.mark.parametrize("backend", ["sdpa", "blocked"])
def test_autocast_casts_queries_and_keys_that_are_wider_than_values(backend):
    """As `qk_norm` leaves them."""
    q, k, v = (
        torch.randn(1, 4, 140, 16),
        torch.randn(1, 4, 140, 16),
        torch.randn(1, 4, 140, 16).bfloat16(),
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = causal_attention(q, k, v, backend=backend)
    assert (
        found.dtype == torch.bfloat16
        and relative(found, causal_attention(q, k, v.float())) < 2e-2
    )


def test_blocks_of_queries_in_half_precision_are_half_as_exact_as_sdpa():
    q, k, v = (torch.randn(2, 4, 200, 32) for _ in range(3))
    exact = causal_attention(q.double(), k.double(), v.double())
    halves = [x.bfloat16() for x in (q, k, v)]
    errors = [
        relative(causal_attention(*halves, backend=backend), exact)
        for backend in ("blocked", "sdpa")
    ]
    # Its scores are rounded to the type of its inputs.
    assert errors[0] < 2 * errors[1] < 2e-2


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "the segment before"]
)
def test_document_boundaries_are_computed_once_per_forward(kind, monkeypatch):
    """The interface of flash-attn, computed by a loop, since it runs on a GPU only."""

    def attend(q, k, v, boundaries, *_, **options):
        stretches = zip(boundaries.tolist(), boundaries.tolist()[1:], strict=False)
        single = [
            tuple(x[None, start:end].transpose(1, 2) for x in (q, k, v))
            for start, end in stretches
        ]
        return torch.cat([causal_attention(*one)[0].transpose(0, 1) for one in single])

    found, real = [], layout.boundaries
    monkeypatch.setattr(backends, "flash_attention", lambda: attend)
    monkeypatch.setattr(
        layout, "boundaries", lambda *given: found.append(1) or real(*given)
    )
    ours, other = (
        model_of(kind),
        Llama(small(segment_length=N, rope_theta=100.0, **KINDS[kind]), "flash2"),
    )
    other.double().load_state_dict(ours.state_dict())
    ids, documents = torch.randint(0, 97, (2, 45)), torch.tensor([ROW, ROW[::-1]])
    assert largest(other(ids, documents), ours(ids, documents)) < 1e-12
    assert len(found) == 1
    assert largest(other(ids), ours(ids)) < 1e-12


def test_an_unavailable_backend_names_what_is_missing():
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(ValueError, match="sdpa, blocked, flash2"):
        causal_attention(q, q, q, backend="triton")
    with pytest.raises(ValueError, match="attention_dropout"):
        causal_attention(q, q, q, backend="blocked", dropout=0.1)
    with pytest.raises(RuntimeError, match="flash_attn_varlen_func"):
        causal_attention(q, q, q, backend="flash2")
