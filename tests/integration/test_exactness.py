"""Interrupted and resumed in fresh processes is bitwise the uninterrupted run, over a pairwise cover of what a run can be."""

import json

import pytest
from integration.exactness.bench import Bench, interrupted_equals_uninterrupted
from integration.exactness.cover import (
    FACTORS,
    WHOLE,
    each_setting_once,
    name_of,
    pairs_of,
    pairwise_cover,
    possible,
)

CELLS = [(name_of(cell), cell) for cell in pairwise_cover(FACTORS, possible)]
EAGER = [(name, cell) for name, cell in CELLS if cell["compile"] == "off"]
# Four or more ranks and compiling take most of the time: the short list meets every setting but compiling once. All pairs meet in the
# whole cover, behind `-m slow` and in `make exactness`.
SHORT = each_setting_once(EAGER)
# Stopped in a step after which was evaluated: the forward pass leaves whole parameters.
STAGE_2 = {
    "world": 2,
    "parallel": "fsdp",
    "stage": 2,
    "precision": "bf16",
    "attention": "softmax",
    "accumulation": 1,
    "compile": "off",
    "save": "async",
    "resumed": 2,
    "epoch": "within",
}
SHORT = [("stage-2", STAGE_2), *SHORT]


def test_in_the_cover_every_two_settings_meet():
    met = set().union(*(pairs_of(cell) for _, cell in CELLS))
    for a, values in FACTORS.items():
        for b, others in FACTORS.items():
            wanted = {
                (a, value, b, other) for value in values for other in others if a < b
            }
            missing = wanted - met
            impossible = ({"world", "parallel"}, {"optimizer", "parallel"})
            assert all({one[0], one[2]} in impossible for one in missing), missing


@pytest.fixture(scope="module")
def bench(tmp_path_factory, server) -> Bench:
    return Bench(tmp_path_factory.mktemp("exactness"), server)


@pytest.mark.timeout(900)
def test_short(bench):
    for precision in (
        "fp32",
        "bf16",
    ):  # two runs that differ in one setting must not look the same
        bench.attempt(precision, EAGER[0][1] | {"precision": precision})
    assert interrupted_equals_uninterrupted(bench, SHORT) == {
        name: [] for name, _ in SHORT
    }
    one, other = bench.result("fp32"), bench.result("bf16")
    assert all(other[key] != one[key] for key in one)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_cover(bench):
    rest = [(name, cell) for name, cell in CELLS if (name, cell) not in SHORT]
    assert interrupted_equals_uninterrupted(bench, rest) == {
        name: [] for name, _ in rest
    }


PADDED = {
    "padding": 128,
    "resumed": 1,
    "epoch": "within",
    "save": "async",
    "compile": "off",
}
PADDED_CELLS = [
    {
        "world": 2,
        "parallel": "ddp",
        "precision": "bf16",
        "attention": "infini",
        "dropout": 0.1,
        "accumulation": 4,
    },
    {
        "world": 2,
        "parallel": "fsdp",
        "precision": "bf16",
        "attention": "softmax",
        "dropout": 0.0,
        "accumulation": 1,
    },
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell",
    [PADDED_CELLS[0], pytest.param(PADDED_CELLS[1], marks=pytest.mark.slow)],
    ids=name_of,
)
def test_a_padded_vocabulary(bench, cell):
    name = f"padded-{name_of(cell)}"
    assert interrupted_equals_uninterrupted(bench, [(name, PADDED | cell)]) == {
        name: []
    }


BEFORE = {
    "attention": "infini",
    "before": True,
    "parallel": "ddp",
    "accumulation": 1,
    "resumed": 1,
    "epoch": "within",
    "save": "async",
}
BEFORE_CELLS = [
    {
        "world": 2,
        "precision": "bf16",
        "dropout": 0.1,
        "compile": "off",
        "isolation": True,
    },
    {"world": 1, "precision": "fp32", "backend": "blocked", "compile": "block"},
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell",
    [BEFORE_CELLS[0], pytest.param(BEFORE_CELLS[1], marks=pytest.mark.slow)],
    ids=name_of,
)
def test_segments_that_see_the_one_before(bench, cell):
    name = f"before-{name_of(cell)}"
    bench.attempt(f"hard-{name}", BEFORE | cell | {"before": False})
    assert interrupted_equals_uninterrupted(bench, [(name, BEFORE | cell)]) == {
        name: []
    }
    sees, other = bench.result(f"{name}-calm"), bench.result(f"hard-{name}")
    assert sees["weights_sha256"] != other["weights_sha256"], (
        "so the key reaches the workers"
    )


BLOCKED = {
    "backend": "blocked",
    "dropout": 0.0,
    "accumulation": 1,
    "resumed": 1,
    "epoch": "within",
    "save": "async",
}
BLOCKED_CELLS = [
    {
        "world": 1,
        "parallel": "ddp",
        "precision": "fp32",
        "attention": "infini",
        "compile": "block",
        "isolation": True,
    },
    {
        "world": 2,
        "parallel": "fsdp",
        "precision": "bf16",
        "attention": "softmax",
        "compile": "off",
    },
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell",
    [pytest.param(BLOCKED_CELLS[0], marks=pytest.mark.slow), BLOCKED_CELLS[1]],
    ids=name_of,
)
def test_blocked_attention(bench, cell):
    name = f"blocked-{name_of(cell)}"
    bench.attempt(f"sdpa-{name}", BLOCKED | cell | {"backend": "sdpa"})
    assert interrupted_equals_uninterrupted(bench, [(name, BLOCKED | cell)]) == {
        name: []
    }
    blocked, other = bench.result(f"{name}-calm"), bench.result(f"sdpa-{name}")
    assert blocked["weights_sha256"] != other["weights_sha256"], (
        "so the setting reaches the workers"
    )
    losses = zip(blocked["metrics"], other["metrics"], strict=True)
    assert max(abs(one["loss"] - two["loss"]) for one, two in losses) < 2e-2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_model_compiled_with_all_that_makes_a_cpu_faster(bench):
    assert interrupted_equals_uninterrupted(bench, WHOLE) == {
        name: [] for name, _ in WHOLE
    }
    for name, _ in WHOLE:
        compiled = json.loads(
            (bench.run(f"{name}-calm").path / "compile.json").read_text()
        )
        assert (compiled["compile"], compiled["reason"]) == ("whole", "")


SHARED = {
    "attention": "infini",
    "save": "async",
    "epoch": "within",
    "optimizer": "adamw",
    "resumed": 1,
}
SHARED_ROWS = [
    {
        "world": 2,
        "parallel": "ddp",
        "context": 2,
        "precision": "fp32",
        "dropout": 0.1,
        "accumulation": 4,
        "compile": "off",
    },
    {
        "world": 4,
        "parallel": "fsdp",
        "context": 2,
        "precision": "bf16",
        "dropout": 0.0,
        "accumulation": 1,
        "compile": "off",
    }
    | {"update": "delta", "isolation": True},
    {
        "world": 4,
        "parallel": "ddp",
        "context": 4,
        "precision": "fp32",
        "dropout": 0.1,
        "accumulation": 1,
        "compile": "block",
    }
    | {"update": "delta_bounded", "isolation": True},
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_context_parallel_is_bitwise(bench):
    cells = [(name_of(cell), SHARED | cell) for cell in SHARED_ROWS]
    assert interrupted_equals_uninterrupted(bench, cells) == {
        name: [] for name, _ in cells
    }
    compiled = json.loads(
        (bench.run(f"{cells[-1][0]}-calm").path / "compile.json").read_text()
    )
    assert compiled["reason"] == ""


WEIGHTED = {
    "loss_weights": (6.0, 1.0),
    "precision": "bf16",
    "attention": "infini",
    "dropout": 0.1,
    "accumulation": 4,
    "isolation": True,
    "compile": "off",
    "chunk": 40,
    "resumed": 2,
    "epoch": "within",
    "save": "async",
    "curriculum": [{"sequence_length": 16, "until": 4}],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell",
    [
        {"world": 2, "parallel": "ddp"},
        pytest.param({"world": 2, "parallel": "fsdp"}, marks=pytest.mark.slow),
    ],
    ids=name_of,
)
def test_weights_of_sources_in_the_loss(bench, cell):
    name = f"weighted-{name_of(cell)}"
    bench.attempt(f"plain-{name}", WEIGHTED | cell | {"loss_weights": (1.0, 1.0)})
    assert interrupted_equals_uninterrupted(bench, [(name, WEIGHTED | cell)]) == {
        name: []
    }
    weighted, plain = bench.result(f"{name}-calm"), bench.result(f"plain-{name}")
    assert weighted["metrics"][0]["loss"] == plain["metrics"][0]["loss"], (
        "the loss that is reported has no weights"
    )
    assert weighted["weights_sha256"] != plain["weights_sha256"]


ELASTIC = {
    "parallel": "ddp",
    "precision": "fp32",
    "attention": "infini",
    "accumulation": 1,
    "compile": "off",
    "dropout": 0.0,
    "save": "async",
    "epoch": "across",
    "batch": 12,
    "micro": 1,
}


def assert_nearly_equal(bench: Bench, one: str, other: str) -> None:
    """The same rows in every global batch, and losses, those of validation too, within 1e-5."""
    rows = bench.rows(other)
    assert (
        rows == bench.rows(one)
        and len(rows) == 10
        and all(len(batch) == 12 for batch in rows.values())
    )
    calm, found = bench.result(one)["metrics"], bench.result(other)["metrics"]
    assert [line["step"] for line in calm] == [line["step"] for line in found]
    assert (
        max(abs(a["loss"] - b["loss"]) for a, b in zip(calm, found, strict=True)) < 1e-5
    )


def test_another_number_of_workers_keeps_batches_and_nearly_the_losses(bench):
    bench.attempt("four", ELASTIC | {"world": 4})
    bench.attempt("shared", ELASTIC | {"world": 4, "context": 2})
    bench.execute()
    assert_nearly_equal(bench, "four", "shared")
    for world, parallel, stop in ((4, "ddp", 3), (3, "fsdp", 3), (1, "ddp", None)):
        bench.attempt(
            "elastic", ELASTIC | {"world": world, "parallel": parallel}, stop_after=stop
        )
        bench.execute()
    assert_nearly_equal(bench, "four", "elastic")


def test_another_number_of_workers_keeps_nearly_the_losses_of_weighted_sources(bench):
    cell = ELASTIC | {"loss_weights": (6.0, 1.0)}
    for world in (1, 2):
        bench.attempt(f"weighted-{world}", cell | {"world": world})
    bench.execute()
    assert_nearly_equal(bench, "weighted-1", "weighted-2")


@pytest.mark.slow
def test_context_parallel_of_packed_documents_equals_one_process(bench):
    cell = ELASTIC | {"isolation": True, "update": "delta"}
    bench.attempt("alone", cell | {"world": 1})
    for context, parallel in ((2, "fsdp"), (4, "ddp")):
        bench.attempt(
            f"context-{context}",
            cell | {"world": 4, "context": context, "parallel": parallel},
        )
    bench.execute()
    for context in (2, 4):
        assert_nearly_equal(bench, "alone", f"context-{context}")
