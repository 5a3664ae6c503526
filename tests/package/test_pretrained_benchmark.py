"""benchmarks/pretrained_memory.py goes on where it was, and counts what it stored."""

import json

import pytest

from support.benchmarks import program

bench = program("pretrained_memory")


@pytest.fixture
def options(run_of, tmp_path, monkeypatch):
    run, _ = run_of(attention="infini", segment_length=64)
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results.jsonl")
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("The green sky and the number of the river. " * 60)
    words = [
        str(run),
        "--segment-lengths",
        "64",
        "128",
        "--boundaries",
        "1",
        "--samples",
        "2",
        "--fillers",
        "repeated",
        "text",
    ]
    return bench.parser().parse_args([*words, "--text", str(tmp_path / "*.txt")])


def test_each_case_is_measured_once_also_after_a_kill(options):
    bench.measure(options)
    whole = bench.RESULTS.read_text()
    assert whole.count("\n") == 2 * (2 * 2 + 2)
    bench.measure(options)
    assert bench.RESULTS.read_text() == whole
    lines = whole.splitlines(keepends=True)
    # In the middle of a line.
    bench.RESULTS.write_text("".join(lines[:3]) + lines[3][:40])
    bench.measure(options)
    assert len(bench.CaseLines(bench.RESULTS).read()) == len(lines)
    before = [json.loads(line) | {"cpu_seconds": 0} for line in lines]
    # of the number behind the cut, the text before it was not read again
    assert [
        line | {"cpu_seconds": 0} for line in bench.CaseLines(bench.RESULTS).read()
    ][4:] == before[4:]


def test_a_cell_is_a_row_of_the_summary(options):
    bench.measure(options)
    rows = bench.summary()
    asked = [row for row in rows if "asked" in row]
    assert (
        len(rows) == 6
        and [row["asked"] for row in asked] == [2] * 4
        and {row["swapped"] for row in asked} <= {0, 1}
    )
    text = next(row for row in rows if "text_targets" in row)
    # The latter only if each text has it.
    assert text["memory_nats"] > 0 and text["no_memory_nats"] > 0
