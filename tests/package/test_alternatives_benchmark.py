"""benchmarks/pretrained_alternatives.py: its sliding window is the same model, it continues where it was, and its sizes are exact."""

import json

import pytest
import torch

from infini_llama.model.llama import Llama
from infini_llama.tasks.export.exporting import export
from support.benchmarks import program
from support.differences import relative
from support.models import small

bench = program("pretrained_alternatives")
# Numbers of a token's keys and values in a layer: two key-value heads of 8.
HEADS = 2 * 2 * 8
TIMES = ("read_seconds", "cpu_seconds", "load", "seconds", "median_seconds")


@pytest.fixture
def llama():
    model = Llama(
        small(num_key_value_heads=2, rope_theta=500.0, initializer_range=0.1)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def logits_in_pieces(window, ids):
    states = window.new_states(1, 0)
    return window.logits(
        torch.cat([window.read(piece, states) for piece in ids.split(7, dim=1)], dim=1)
    )


@torch.no_grad()
def test_a_window_longer_than_the_text_gives_the_logits_of_full_attention(llama):
    ids = torch.randint(97, (1, bench.WINDOW_PIECE + 40))
    window = bench.SlidingWindow(llama, ids.shape[1] + 1)
    assert (
        relative(window.logits(window.read(ids, window.new_states(1, 0))), llama(ids))
        < 1e-5
    )
    assert relative(logits_in_pieces(window, ids), llama(ids)) < 1e-5


@torch.no_grad()
def test_a_shorter_window_reads_no_further_back_than_its_layers_reach(llama):
    window, ids = bench.SlidingWindow(llama, 5), torch.randint(97, (1, 40))
    last = logits_in_pieces(window, ids)[0, -1]
    assert relative(last, window.theirs(ids, use_cache=False).logits[0, -1]) < 1e-5
    reach = llama.config.num_hidden_layers * 4
    for back, changes in ((reach, True), (reach + 1, False)):
        other = ids.clone()
        other[0, -1 - back] = (ids[0, -1 - back] + 1) % 97
        assert torch.equal(logits_in_pieces(window, other)[0, -1], last) != changes


@torch.inference_mode()
def test_layers_that_share_buffers_decode_what_each_would_with_its_own(llama):
    shared = bench.full_decoding(llama, 20, most_bytes=0)
    assert shared.layers_in_memory == 1
    states = llama.new_states(1, 21)
    torch.manual_seed(5)
    for state in states.layers:
        state.k.normal_()
        state.v.normal_()
        state.filled = [20]
    torch.manual_seed(5)
    own = bench.full_decoding(llama, 20, most_bytes=2**30)
    assert (
        own.layers_in_memory == llama.config.num_hidden_layers
        and own.state_bytes == shared.state_bytes
    )
    expected = llama.decode(torch.zeros(1, dtype=torch.long), states)
    assert torch.equal(own.step(), expected) and torch.equal(own.step(), expected)


@pytest.fixture
def options(run_of, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results.jsonl")
    softmax, _ = run_of(name="original")
    export(
        softmax,
        tmp_path / "folder",
        checkpoint="latest",
        dtype="float32",
        max_shard_size="5GB",
    )
    run, _ = run_of(name="memory", attention="infini", segment_length=64)
    words = f"{tmp_path}/folder --run {run} --boundaries 1 --samples 1 --windows 8 --factors cover 100 --lengths 40 200"
    return bench.parser().parse_args(
        [*words.split(), "--repetitions", "2", "--state-gib", "0"]
    )


def test_each_case_of_each_method_is_measured_once(options):
    bench.measure(options)
    whole = bench.RESULTS.read_text()
    lines = [json.loads(line) for line in whole.splitlines()]
    asked = [line for line in lines if line["kind"] == "passkey"]
    assert [line["method"] for line in asked] == [
        "full",
        "yarn",
        "yarn",
        "window",
        "memory",
    ]
    covering, named = asked[1:3]
    context, most_answer = 16, 6
    assert covering["rope_factor"] * context >= covering["tokens"]
    assert (covering["rope_factor"] - 1) * context < covering["tokens"] + most_answer
    assert named["rope_factor"] == 100
    bench.measure(options)
    assert bench.RESULTS.read_text() == whole
    bench.RESULTS.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    bench.measure(options)
    again = [json.loads(line) for line in bench.RESULTS.read_text().splitlines()]
    assert [without_times(line) for line in again] == [
        without_times(line) for line in lines
    ]
    assert len(bench.summary()) == len(lines)


def test_a_text_that_the_original_covers_is_not_asked_with_the_covering_factor(options):
    file = options.original / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 4096})
    )
    options.kinds, options.methods = ["passkey"], ["yarn"]
    bench.measure(options)
    assert [line["factor"] for line in bench.CaseLines(bench.RESULTS).read()] == [100]


def without_times(line):
    return {name: value for name, value in line.items() if name not in TIMES}


def test_sizes_of_the_states_are_exact(options):
    options.kinds = ["cost"]
    bench.measure(options)
    sizes = {
        (line["method"], line["tokens"]): line["state_bytes"]
        for line in bench.CaseLines(bench.RESULTS).read()
    }
    layers, two_bytes, four_bytes = 2, 2, 4
    for tokens in options.lengths:
        assert sizes["full", tokens] == layers * HEADS * (tokens + 1) * two_bytes
        assert sizes["window", tokens] == layers * HEADS * 8 * two_bytes
        # Keys, values, and keys that are not rotated.
        segment = (HEADS + HEADS // 2) * 64 * two_bytes
        assert sizes["memory", tokens] == layers * (
            segment + 2 * (8 * 8 + 8) * four_bytes
        )
