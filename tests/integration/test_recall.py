"""The shortened form of benchmarks/recall.py: the memory is learned, and nothing else can do its work."""

import pytest
import torch

from support.benchmarks import program

recall = program("recall")


def test_a_row_queries_facts_of_earlier_segments():
    inputs, labels = recall.rows(50, 4, torch.Generator().manual_seed(0))
    for row, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
        facts = [
            token - recall.FIRST_FACT for token in row[:48] if token != recall.FILLER
        ]
        known = {
            recall.FIRST_QUERY + fact // 16: recall.FIRST_ANSWER + fact % 16
            for fact in facts
        }
        asked = {
            token: answer
            for token, answer in zip(row, answers, strict=True)
            if answer != recall.IGNORE_INDEX
        }
        assert (
            len(known) == 6
            and asked == known
            and not any(answer >= 0 for answer in answers[:48])
        )


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["delta", "delta_bounded"])
def test_the_memory_learns_to_recall(variant):
    """The linear memory: test_memory_benchmark.py."""
    model, _ = recall.train(variant, seed=0, steps=600)
    assert recall.accuracy(model, 4) > 0.95
    model.use_memory(False)
    assert recall.accuracy(model, 4) < 0.12
