"""Interrupted and resumed in fresh processes is bitwise the uninterrupted run, over a pairwise cover of what a run can be."""

import pytest
from exactness.bench import Bench, interrupted_equals_uninterrupted
from exactness.cover import FACTORS, name_of, pairs_of, pairwise_cover, possible

CELLS = [(name_of(cell), cell) for cell in pairwise_cover(FACTORS, possible)]
EAGER = [(name, cell) for name, cell in CELLS if cell["compile"] == "off"]
COMPILED = [(name, cell) for name, cell in CELLS if cell["compile"] != "off"]
# Compiling takes most of the time, so one such cell is in the short list, and the whole cover is behind `-m slow`.
SHORT = [*EAGER, min(COMPILED, key=lambda item: item[1]["world"])]


def test_in_the_cover_every_two_settings_meet():
    met = set().union(*(pairs_of(cell) for _, cell in CELLS))
    for a, values in FACTORS.items():
        for b, others in FACTORS.items():
            wanted = {(a, value, b, other) for value in values for other in others if a < b}
            missing = wanted - met
            impossible = ({"world", "parallel"}, {"optimizer", "parallel"})
            assert all({one[0], one[2]} in impossible for one in missing), missing


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("exactness"))


@pytest.mark.timeout(900)
def test_short(bench):
    assert interrupted_equals_uninterrupted(bench, SHORT) == {name: [] for name, _ in SHORT}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_cover(bench):
    rest = [(name, cell) for name, cell in CELLS if (name, cell) not in SHORT]
    assert interrupted_equals_uninterrupted(bench, rest) == {name: [] for name, _ in rest}


def test_the_comparison_sees_a_difference(bench):
    """Two runs that differ in one setting must not look the same."""
    _, cell = EAGER[0]
    for name, precision in (("fp32", "fp32"), ("bf16", "bf16")):
        bench.attempt(name, cell | {"precision": precision})
    bench.execute()
    one, other = bench.result("fp32"), bench.result("bf16")
    assert all(other[key] != one[key] for key in one)


ELASTIC = {"parallel": "ddp", "precision": "fp32", "attention": "infini", "accumulation": 1, "compile": "off"}
ELASTIC |= {"dropout": 0.0, "save": "async", "epoch": "across", "batch": 12, "micro": 1}


def test_another_number_of_workers_sees_the_same_batches_and_nearly_the_same_losses(bench):
    bench.attempt("four", ELASTIC | {"world": 4})
    bench.execute()
    for world, parallel, stop in ((4, "ddp", 3), (2, "fsdp", 2), (3, "fsdp", 2), (1, "ddp", None)):
        bench.attempt("elastic", ELASTIC | {"world": world, "parallel": parallel}, stop_after=stop)
        bench.execute()
    rows = bench.rows("elastic")
    assert rows == bench.rows("four") and len(rows) == 10 and all(len(batch) == 12 for batch in rows.values())
    calm, elastic = bench.result("four")["metrics"], bench.result("elastic")["metrics"]
    assert [line["step"] for line in calm] == [line["step"] for line in elastic]
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(calm, elastic, strict=True)) < 1e-5
