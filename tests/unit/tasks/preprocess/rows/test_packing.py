from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_llama.configs.packing import PACKED
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.preprocess.rows.packing import (
    RowArrays,
    compute_rows,
    costs_of,
    pack,
    row_count,
)
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import document_lengths, map_shard
from infini_llama.tasks.report.dataset import describe
from infini_llama.tasks.storage.artifacts import read_dataset
from infini_llama.tasks.train.worker.data.loader import (
    BatchPlan,
    TrainBatches,
    curriculum_stages,
    to_batch,
)
from infini_llama.tasks.verify_data.checks import verify

LENGTHS = st.lists(st.integers(1, 40) | st.integers(1, 6), min_size=1, max_size=40)


def rows_of(packed: RowArrays) -> list[list[tuple[int, int]]]:
    """Rows as lists of (first token, tokens)."""
    bounds = packed.entries.tolist()
    return [
        [tuple(piece) for piece in packed.pieces[a:b].tolist()]
        for a, b in pairwise(bounds)
    ]


def literal_pieces(lengths: list[int], length: int) -> list[tuple[int, int]]:
    pieces, start = [], 0
    for size in lengths:
        at, end = start, start + size
        while end - at > length + 1:
            pieces.append((at, length + 1))
            at += length
        if end - at > 1:
            pieces.append((at, end - at))
        start = end
    return pieces


def literal_rows(
    pieces: list[tuple[int, int]], capacity: int, strategy: str
) -> list[list[tuple[int, int]]]:
    """Each strategy as its textbook says it, over all rows for each piece."""
    rows: list[list[tuple[int, int]]] = []

    def free(row: int) -> int:
        return capacity - sum(size for _, size in rows[row])

    for piece in (
        sorted(pieces, key=lambda piece: -piece[1])
        if strategy == "best_fit"
        else pieces
    ):
        fitting = [row for row in range(len(rows)) if free(row) >= piece[1]]
        if strategy == "padded":
            fitting = []
        elif strategy == "greedy":
            fitting = [row for row in fitting if row == len(rows) - 1]
        chosen = (
            min(fitting, key=free)
            if strategy == "best_fit" and fitting
            else fitting[0]
            if fitting
            else None
        )
        if chosen is None:
            rows.append([piece])
        else:
            rows[chosen].append(piece)
    return rows


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, length=st.integers(2, 20), strategy=st.sampled_from(PACKED))
def test_rows_are_those_of_the_textbook_and_every_token_is_a_target_once(
    lengths, length, strategy
):
    packed = pack(np.array(lengths, dtype=np.int64), length, strategy)
    found, literal = (
        rows_of(packed),
        literal_rows(literal_pieces(lengths, length), length + 1, strategy),
    )
    if strategy == "best_fit":  # of rows with equal space any is the best
        assert (
            sorted(sorted(size for _, size in row) for row in found)
            and len(found) == len(literal)
            if literal
            else not found
        )
        assert sorted(sum(size for _, size in row) for row in found) == sorted(
            sum(size for _, size in row) for row in literal
        )
    else:
        assert found == literal
    assert all(sum(size for _, size in row) <= length + 1 and row for row in found)
    targets = [
        start + k for row in found for start, size in row for k in range(1, size)
    ]
    firsts = np.cumsum([0, *lengths[:-1]]).tolist()
    assert sorted(targets) == [
        token for token in range(sum(lengths)) if token not in firsts
    ]
    costs = costs_of(packed, np.array(lengths), length)
    assert costs.targets == len(targets) and costs.lost_tokens == lengths.count(1)
    assert costs.cut_documents == sum(size > length + 1 for size in lengths)
    places = len(found) * (length + 1)
    assert costs.efficiency == pytest.approx(
        sum(size for row in found for _, size in row) / max(1, places)
    )


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, length=st.integers(2, 20), stride=st.integers(1, 20))
def test_windows_overlap_by_the_stride_and_their_cost_is_counted(
    lengths, length, stride
):
    tokens, table = sum(lengths), np.array(lengths)
    if tokens <= length or stride > length:
        return
    windows = compute_rows(table, "window", length, stride)
    starts = windows.entries
    assert starts.tolist() == [
        start for start in range(0, tokens, stride) if start + length + 1 <= tokens
    ]
    assert row_count(tokens, length, length) == row_count(tokens, length)
    covered = {
        token for start in starts.tolist() for token in range(start, start + length + 1)
    }
    ends = np.cumsum(lengths).tolist()
    rows = [(start, start + length + 1) for start in starts.tolist()]
    cut = sum(
        not any(a <= end - size and end <= b for a, b in rows)
        for end, size in zip(ends, lengths, strict=True)
    )
    costs = costs_of(windows, table, length)
    assert (costs.lost_tokens, costs.cut_documents) == (tokens - len(covered), cut)


def test_best_fit_wastes_less_than_a_thousandth():
    choose = np.random.default_rng(7)
    # Median 740, mean 2,200.
    lengths = np.clip(choose.lognormal(6.6, 1.5, 20_000), 4, 200_000).astype(np.int64)
    packed = pack(lengths, 2048, "best_fit")
    assert costs_of(packed, lengths, 2048).efficiency >= 0.999
    assert (
        pack(lengths, 2048, "first_fit").entries.size
        < pack(lengths, 2048, "greedy").entries.size
    )


@pytest.mark.parametrize("strategy", [*PACKED, "window"])
def test_a_dataset_of_each_strategy_is_built_verified_and_described(
    data, tmp_path, strategy
):
    extra = {"stride": 5} if strategy == "window" else {}
    whole = preprocess(data(), tmp_path)
    reference = preprocess(data(packing=strategy, **extra), tmp_path)
    assert reference.digest == whole.digest and reference.built == ("row tables",)
    verify(reference, tmp_path, "deep")
    folder = tmp_path / reference.path
    statistics = describe(folder).row_tables[reference.row_table].packing.train
    shards = read_dataset(folder).content.train.shards
    stream = np.concatenate([map_shard(folder / shard.file)[1] for shard in shards])
    reader = TokenReader(folder, reference.row_table, "train", verify_on_read=True)
    numbers = np.arange(len(reader), dtype=np.int64)
    tokens, mask = reader.gather(numbers), reader.targets(numbers)
    assert (
        len(reader) == reference.train.rows
        and reader.count_targets(numbers) == statistics.targets
    )
    if strategy == "window":
        assert mask is None and tokens[1].tolist() == stream[5 : 5 + 17].tolist()
        return
    assert mask is not None and mask.sum() == statistics.targets
    lengths = document_lengths(folder, shards)
    firsts = lengths.cumsum() - lengths
    assert sorted(tokens[:, 1:][mask].tolist()) == sorted(
        np.delete(stream, firsts).tolist()
    )


def test_training_never_learns_from_padding_and_counts_are_exact(data, tmp_path):
    reference = preprocess(data(packing="padded"), tmp_path)
    reader = TokenReader(tmp_path / reference.path, reference.row_table, "train")
    torch.manual_seed(0)
    model = Llama(LlamaConfig(300, 16, 32, 1, 2, 1, 16)).double()
    rows = np.flatnonzero(np.diff(reader.rows.bounds) > 0)[:60]
    tokens, mask = reader.gather(rows), reader.targets(rows)
    assert mask is not None and not mask.all()
    inputs, labels, *_ = to_batch(tokens, mask, torch.device("cpu"))
    total, count = model.loss(inputs, labels)
    single = torch.zeros((), dtype=torch.float64)
    for row, used in zip(tokens, mask, strict=True):
        # A row of one piece: its tokens without the padding.
        length = int(used.sum()) + 1
        single += model.loss(*to_batch(row[None, :length], None, torch.device("cpu")))[
            0
        ]
    assert count == mask.sum() == reader.count_targets(
        rows
    ) and total.item() == pytest.approx(single.item(), rel=1e-9)
    for world in (1, 2, 4):
        batches = [
            TrainBatches(curriculum_stages(reader), BatchPlan(3, 8, 2, rank, world))
            for rank in range(world)
        ]
        counted = sum(
            int((labels != -100).sum())
            for b in batches
            for _, labels, *_ in b.micro_batches(16, torch.device("cpu"))
        )
        assert counted == batches[0].targets(16)


@pytest.mark.parametrize("strategy", ["best_fit", "concat"])
def test_the_loss_of_isolated_documents_is_that_of_single_rows(
    data, tmp_path, strategy
):
    reference = preprocess(data(packing=strategy), tmp_path)
    reader = TokenReader(tmp_path / reference.path, reference.row_table, "train")
    torch.manual_seed(0)
    model = Llama(LlamaConfig(300, 16, 32, 1, 2, 1, 16)).double()
    (inputs, labels, documents, _), *_ = TrainBatches(
        curriculum_stages(reader), BatchPlan(3, 60, 60, 0, 1, isolate=True)
    ).micro_batches(0, torch.device("cpu"))
    single, shared = torch.zeros((), dtype=torch.float64), 0
    for row, label, document in zip(inputs, labels, documents, strict=True):
        numbers = [number for number in document.unique().tolist() if number >= 0]
        shared += len(numbers) > 1
        for number in numbers:
            mine = document == number
            single += model.loss(row[None, mine], label[None, mine])[0]
    assert shared
    assert model.loss(inputs, labels, documents)[0].item() == pytest.approx(
        single.item(), rel=1e-9
    )
    assert model.loss(inputs, labels)[0].item() != pytest.approx(
        single.item(), rel=1e-9
    )
    plain = TrainBatches(curriculum_stages(reader), BatchPlan(3, 8, 2, 0, 1))
    assert next(plain.micro_batches(0, torch.device("cpu"))).documents is None
