import threading

import numpy as np
import pytest
import torch

from infini_llama.configs.errors import DataError
from infini_llama.tasks.preprocess.tokens.order import next_sample
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.records.lineage import SampleRange
from infini_llama.tasks.train.worker.data.loader import (
    BatchPlan,
    Prefetch,
    TrainBatches,
    curriculum_stages,
)

CPU = torch.device("cpu")
LEFT_OUT = [SampleRange(first=16, end=32)]


class Rows(TokenReader):
    """A reader of numbered rows, of which one cannot be read."""

    sequence_length = 4

    def __init__(self, damaged: int = -1) -> None:
        self.damaged, self.built_by = damaged, set()

    def __len__(self) -> int:
        return 37

    def gather(self, rows: np.ndarray) -> np.ndarray:
        self.built_by.add(threading.current_thread().name.split("_")[0])
        if self.damaged in rows:
            raise DataError(f"row {self.damaged} is damaged.")
        return rows[:, None] * 100 + np.arange(5)

    def targets(self, rows: np.ndarray) -> None:
        return None

    def count_targets(self, rows: np.ndarray) -> int:
        return 4 * len(rows)


def following(samples: int) -> int:
    return next_sample(samples + 8, LEFT_OUT)


def steps(
    reader: Rows, workers: int, first: int = 0, count: int = 12
) -> list[tuple[int, list, int]]:
    batches, seen, at = (
        TrainBatches(curriculum_stages(reader), BatchPlan(7, 8, 2, 0, 1)),
        [],
        first,
    )
    with Prefetch(batches, CPU, following, workers) as prefetch:
        for _ in range(count):
            built, targets = prefetch.batch_at(at)
            seen.append(
                (
                    at,
                    [[part.tolist() for part in batch[:2]] for batch in built],
                    targets,
                )
            )
            at = following(at)
    return seen


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_prefetching_threads_give_the_same_batches_from_any_step(workers):
    reader = Rows()
    expected = steps(Rows(), 0)
    assert [at for at, *_ in expected][:4] == [0, 8, 32, 40]
    assert steps(reader, workers) == expected and reader.built_by == {"data"}
    assert steps(Rows(), workers, first=expected[5][0], count=7) == expected[5:]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_is_raised_at_its_own_step_and_no_thread_is_left(workers):
    batches = TrainBatches(curriculum_stages(Rows()), BatchPlan(7, 8, 2, 0, 1))
    damaged = int(batches.rows(32)[3])
    assert all(damaged not in batches.rows(at) for at in (0, 8))
    with Prefetch(
        TrainBatches(curriculum_stages(Rows(damaged)), BatchPlan(7, 8, 2, 0, 1)),
        CPU,
        following,
        workers,
    ) as prefetch:
        prefetch.batch_at(0), prefetch.batch_at(8)
        with pytest.raises(DataError, match=f"row {damaged} "):
            prefetch.batch_at(32)
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("data_")
    ]


def test_a_seek_is_followed():
    with Prefetch(
        TrainBatches(curriculum_stages(Rows()), BatchPlan(7, 8, 2, 0, 1)),
        CPU,
        following,
        2,
    ) as prefetch:
        prefetch.batch_at(0)
        jumped = prefetch.batch_at(80)
    assert torch.equal(
        jumped[0][0][0],
        next(
            TrainBatches(
                curriculum_stages(Rows()), BatchPlan(7, 8, 2, 0, 1)
            ).micro_batches(80, CPU)
        )[0],
    )
