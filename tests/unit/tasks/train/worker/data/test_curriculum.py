"""Rows that grow longer: the same text in as many tokens a step, an order that can be asked for anywhere."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig, PipelineConfig
from infini_llama.tasks.preprocess.rows.references import reference_for
from infini_llama.tasks.preprocess.stage import Preparation, preprocess
from infini_llama.tasks.preprocess.tokens.order import next_sample
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.records.lineage import Lineage, SampleRange
from infini_llama.tasks.train.binding import bind_run
from infini_llama.tasks.train.worker.data.loader import (
    BatchPlan,
    TrainBatches,
    curriculum_stages,
)
from infini_llama.tasks.verify_data.checks import verify
from support.damage import flip
from support.records import make_attempt, make_dataset, make_plan

CPU = torch.device("cpu")


class Rows(TokenReader):
    """`rows` numbered rows of one length."""

    def __init__(self, sequence_length: int, rows: int) -> None:
        self.sequence_length, self.rows, self.sources = sequence_length, rows, []

    def __len__(self) -> int:
        return self.rows

    def gather(self, rows: np.ndarray) -> np.ndarray:
        return np.repeat(rows[:, None], self.sequence_length + 1, axis=1)

    def targets(self, rows: np.ndarray) -> None:
        return None

    def count_targets(self, rows: np.ndarray) -> int:
        return self.sequence_length * len(rows)


def batches(
    world: int = 1, rank: int = 0, micro: int = 2, skipped: Sequence[SampleRange] = ()
) -> TrainBatches:
    shorter = [(Rows(4, 90), 16), (Rows(8, 41), 40)]
    return TrainBatches(
        curriculum_stages(Rows(16, 23), shorter=shorter),
        BatchPlan(7, 8, micro, rank, world, skipped=skipped),
    )


def test_each_stage_has_its_own_rows_and_as_many_tokens_per_step():
    of = batches()
    shapes = [
        {tuple(inputs.shape) for inputs, *_ in of.micro_batches(at, CPU)}
        for at in range(0, 64, 8)
    ]
    assert shapes == [{(8, 4)}] * 2 + [{(4, 8)}] * 3 + [{(2, 16)}] * 3
    assert [of.targets(at) for at in range(0, 64, 8)] == [8 * 16] * 8
    single = TrainBatches(curriculum_stages(Rows(16, 23)), BatchPlan(7, 8, 2, 0, 1))
    assert np.array_equal(of.rows(40), single.rows(0)) and np.array_equal(
        of.rows(48), single.rows(8)
    )
    first = np.concatenate([of.rows(at) for at in (0, 8)])
    assert len(set(first.tolist())) == 64 and first.max() < 90


@pytest.mark.parametrize(
    "ranges",
    [
        [(8, 16)],
        [(0, 24)],
        [(16, 24), (24, 32)],
        [(32, 56)],
        [(8, 16), (8, 64), (48, 56)],
        [(40, 48)],
        [(8, 24), (48, 56)],
    ],
    ids=str,
)
def test_a_stage_has_all_its_steps_also_where_a_rollback_left_samples_out(ranges):
    skipped = [SampleRange(first=first, end=end) for first, end in ranges]
    of, samples, lengths = batches(skipped=skipped), 0, list[int]()
    for _ in range(8):
        samples = next_sample(samples, skipped)
        lengths.append(of.stage(samples).reader.sequence_length)
        samples += 8
    assert lengths == [4, 4, 8, 8, 8, 16, 16, 16]


class Masked(Rows):
    """Rows of which those numbered `counting` alone have targets."""

    counting: tuple[int, ...] = ()

    def count_targets(self, rows: np.ndarray) -> int:
        return int(np.isin(rows, self.counting).sum())


def test_all_ranks_find_the_same_first_micro_batch_with_targets():
    reader = Masked(16, 40)
    ranks = [
        TrainBatches(curriculum_stages(reader), BatchPlan(7, 8, 2, rank, 2))
        for rank in range(2)
    ]
    # The second micro-batch of each rank's four samples of step 1.
    reader.counting = tuple(ranks[0].rows(8)[[3, 6]].tolist())
    assert [of.first_with_targets() for of in ranks] == [(8, 1)] * 2
    reader.counting = tuple(ranks[0].rows(8)[[3, 4]].tolist())
    assert [of.first_with_targets() for of in ranks] == [(8, 0)] * 2
    reader.counting = ()
    assert ranks[0].first_with_targets() == (0, 0)
    assert batches().first_with_targets() == (0, 0)


@given(
    world=st.sampled_from([1, 2, 4, 8]),
    micro=st.sampled_from([1, 2, 4, 8]),
    step=st.integers(0, 12),
)
@settings(deadline=None, max_examples=40)
def test_ranks_and_micro_batches_do_not_change_the_order_of_rows(world, micro, step):
    micro = min(micro, 8 // world)
    of_ranks = [batches(world, rank, micro) for rank in range(world)]
    seen = [
        int(row[0])
        for of in of_ranks
        for inputs, *_ in of.micro_batches(8 * step, CPU)
        for row in inputs
    ]
    assert seen == batches().rows(8 * step).tolist()


def test_steps_and_shares_become_samples(tmp_path, caplog):
    caplog.set_level("WARNING", "infini_llama")
    tables = [
        {"row_table": name, "row_table_digest": name, "sequence_length": 8, "rows": 9}
        for name in ("a", "b")
    ]
    dataset = make_dataset(curriculum=tables, sequence_length=32)
    lengths = [{"sequence_length": 8}, {"sequence_length": 16}]

    def shorter_rows(
        home: str, stages: list[dict], **model
    ) -> tuple[tuple[str, int], ...]:
        sections = {
            "data": {
                "source": "python-stdlib",
                "sequence_length": 32,
                "curriculum": stages,
            },
            "train": {"max_steps": 100, "global_batch_size": 8, "warmup_steps": 5},
            "model": model,
            "runtime": {"home": str(tmp_path / home), "name": "mine"},
        }
        settings = PipelineConfig.model_validate(sections)
        lineage = bind_run(settings, dataset, make_plan())
        return make_attempt(
            tmp_path / home / "runs" / "mine",
            settings,
            dataset=dataset,
            lineage=lineage,
        ).shorter_rows

    shares = [
        length | {"until": share}
        for length, share in zip(lengths, (0.25, 0.5), strict=True)
    ]
    assert (
        shorter_rows("shares", shares) == (("a", 200), ("b", 400)) and not caplog.text
    )
    steps = [
        length | {"until": step}
        for length, step in zip(lengths, (25, 100), strict=True)
    ]
    assert shorter_rows("steps", steps) == (("a", 200), ("b", 800))
    assert "train.max_steps=100" in caplog.text
    with pytest.raises(ConfigError, match=r"model\.segment_length=8"):
        shorter_rows("infini", steps, attention="infini", segment_length=8)


@pytest.fixture
def staged(data) -> DataConfig:
    return data(
        curriculum=[
            {"sequence_length": 4, "until": 2},
            {"sequence_length": 8, "until": 5},
        ]
    )


def test_every_stage_has_its_row_table_over_the_same_tokens(data, staged, tmp_path):
    plain = preprocess(data(), tmp_path)
    assert (
        Preparation(staged, tmp_path).lookup() is None
        and "curriculum" not in plain.to_json()
    )
    reference = preprocess(staged, tmp_path)
    assert reference.built == ("row tables",) and reference.digest == plain.digest
    assert [stage.sequence_length for stage in reference.curriculum] == [4, 8]
    assert changed(reference, built=[]) == Preparation(staged, tmp_path).lookup()
    assert plain == changed(reference, curriculum=[], built=plain.built)
    planned = Preparation(staged, tmp_path).plan()
    assert [stage.row_table for stage in planned.curriculum] == [
        stage.row_table for stage in reference.curriculum
    ]
    assert (
        planned.table.row_table
        == plain.row_table
        == Preparation(data(), tmp_path).plan().table.row_table
    )
    assert reference_for(staged, tmp_path / reference.path, tmp_path) == changed(
        reference, built=[]
    )
    verify(reference, tmp_path, "deep")


@pytest.mark.parametrize("ends", [(0.25, 0.5), (10, 25)], ids=["fractions", "steps"])
def test_a_length_in_tokens_counts_the_targets_of_each_stage(
    ends, data, tmp_path, caplog
):
    """Padded sequences: more of the short ones are targets."""
    caplog.set_level("WARNING", "infini_llama")
    stages = [
        {"sequence_length": size, "until": end}
        for size, end in zip((16, 64), ends, strict=True)
    ]
    padded = data(packing="padded", sequence_length=512, curriculum=stages)
    reference = preprocess(padded, tmp_path)

    def trained(max_tokens: int) -> tuple[float, Lineage]:
        train = {
            "max_tokens": max_tokens,
            "warmup_steps": 0,
            "global_batch_size": 4,
            "micro_batch_size": 2,
        }
        sections = {"data": padded, "train": train, "runtime": {"home": str(tmp_path)}}
        lineage = bind_run(
            PipelineConfig.model_validate(sections), reference, make_plan()
        )
        tables = (
            *(stage.row_table for stage in reference.curriculum),
            reference.row_table,
        )
        *short, full = (
            TokenReader(tmp_path / reference.path, table, "train") for table in tables
        )
        shorter = [
            (reader, 4 * end)
            for reader, end in zip(short, lineage.curriculum_ends, strict=True)
        ]
        batches = TrainBatches(
            curriculum_stages(full, shorter), BatchPlan(7, 4, 2, 0, 1)
        )
        return sum(
            batches.targets(4 * step) for step in range(lineage.max_steps)
        ) / max_tokens, lineage

    shares, runs = zip(
        *(trained(number) for number in (120_000, 120_000, 240_000)), strict=True
    )
    assert all(0.97 < share < 1.03 for share in shares)
    assert runs[0] == runs[1] and runs[1].curriculum_ends == runs[2].curriculum_ends
    # A length that is not changed stays as it is.
    assert caplog.text.count("from here on") == 1


def test_a_damaged_table_of_a_curriculum_stage_is_rebuilt(staged, tmp_path):
    reference = preprocess(staged, tmp_path)
    table = (
        tmp_path
        / reference.path
        / "chunks"
        / reference.curriculum[1].row_table
        / "train.rows.npy"
    )
    flip(table, -1)
    with pytest.raises(DataError, match=str(table)):
        verify(reference, tmp_path, "quick")
    assert preprocess(staged, tmp_path, repair=True) == changed(
        reference, built=["row tables"]
    )
    verify(reference, tmp_path, "quick")
