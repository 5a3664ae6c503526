"""benchmarks/facts_in_books.py measures each case once."""

import pytest

from support.benchmarks import program

bench = program("facts_in_books")


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results.jsonl")
    book = tmp_path / "book.txt"
    book.write_text("The green sky and the number of the river. " * 900)
    words = ["--text", str(book), "--language", str(book), "--rows", "2"]
    words += ["--forms", "sentences", "--samples", "2", "--segment-length", "64"]
    return [*words, "--lengths", "256"]


def test_lengths_that_are_not_stored_are_measured(run_of, options):
    run, _ = run_of(attention="infini", segment_length=64)
    options = [str(run), *options]
    bench.measure(bench.parser().parse_args(options))
    lines = bench.CaseLines(bench.RESULTS).read()
    assert [line.get("memory") or line["length"] for line in lines] == [
        256,
        "empty",
        "full",
        "none",
    ]
    assert {len(line["nats"]) for line in lines[1:]} == {bench.ROW_SEGMENTS}
    assert lines[1]["nats"][1:] != lines[3]["nats"][1:], "the memory is read"
    bench.measure(bench.parser().parse_args([*options, "512"]))
    again = bench.CaseLines(bench.RESULTS).read()
    assert again[:4] == lines and [line["length"] for line in again[4:]] == [512]


@pytest.mark.parametrize("context", [64, 4096])
def test_full_attention_is_asked_the_same_with_yarn_if_need_be(
    run_of, options, context
):
    memory, _ = run_of("memory", attention="infini", attend_previous_segment=True)
    run, _ = run_of(attention="softmax", max_position_embeddings=context)
    bench.measure(bench.parser().parse_args([str(memory), str(run), *options]))
    of_memory, *_, found, empty, full = bench.CaseLines(bench.RESULTS).read()
    for same in ("length", "tokens", "distance"):
        assert found[same] == of_memory[same]
    assert found["length"] == 256 < found["tokens"]
    covers = found["rope_factor"] * context
    assert found["tokens"] <= covers - 5
    assert (found["rope_factor"] == 1) == (context == 4096)
    assert (empty["memory"], full["memory"]) == ("empty", "full")
    assert empty["nats"][0] != full["nats"][0], "the end of the book is seen"


def test_a_run_without_a_memory_or_full_attention_has_language_alone(run_of, options):
    run, _ = run_of(attention="local", segment_length=64)
    bench.measure(bench.parser().parse_args([str(run), *options]))
    kinds = [line["kind"] for line in bench.CaseLines(bench.RESULTS).read()]
    assert kinds == ["language", "language"]
