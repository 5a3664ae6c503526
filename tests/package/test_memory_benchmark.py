"""The shortened form of benchmarks/memory.py: facts are where it says, and the memory carries them beyond the trained length."""

from dataclasses import replace

import pytest
import torch

from support.benchmarks import program

memory = program("memory")


def rows(name: str, segments: int, far: bool):
    """Each row's tokens, and its labels by place."""
    inputs, labels = memory.TASKS[name].rows(
        40, segments, torch.Generator().manual_seed(0), far
    )
    for row, wanted in zip(inputs.tolist(), labels.tolist(), strict=True):
        yield (
            row,
            {
                place: label
                for place, label in enumerate(wanted)
                if label != memory.IGNORE_INDEX
            },
        )


@pytest.mark.parametrize(("segments", "far"), [(2, False), (6, False), (6, True)])
def test_a_passkey_lies_in_an_earlier_segment_and_is_queried_in_the_last(segments, far):
    key, question = memory.FILLERS + 10, memory.FILLERS + 11
    seen = set()
    for row, wanted in rows("passkey", segments, far):
        hidden, asked = row.index(key), row.index(question)
        digits = row[hidden + 1 : hidden + 6]
        assert wanted == {asked + place: digit for place, digit in enumerate(digits)}
        assert all(memory.FILLERS <= digit < key for digit in digits)
        assert (
            hidden // 16 == (hidden + 5) // 16
            and asked // 16 == (asked + 5) // 16 == segments - 1
        )
        seen.add(hidden // 16)
    assert seen == ({0} if far else set(range(segments - 1)))


@pytest.mark.parametrize(("segments", "far"), [(2, False), (5, False), (5, True)])
def test_pairs_are_queried_by_their_keys_only(segments, far):
    key = memory.FILLERS + memory.DIGITS + 2 * memory.LETTERS
    orders = set()
    for row, wanted in rows("pairs", segments, far):
        starts = [place for place, token in enumerate(row) if token == key]
        facts = {
            tuple(row[start + 1 : start + 3]): row[start + 3 : start + 5]
            for start in starts
        }
        asked = [place for place, token in enumerate(row) if token == key + 1]
        assert (
            len(starts)
            == len(facts)
            == len(asked)
            == 3
            == len({value[0] for value in facts.values()})
        )
        assert all(place // 16 == (place + 4) // 16 == segments - 1 for place in asked)
        assert all(
            place // 16 == (place + 4) // 16 < (1 if far else segments - 1)
            for place in starts
        )
        names = [tuple(row[place + 1 : place + 3]) for place in asked]
        orders.add(tuple(list(facts).index(name) for name in names))
        answers = {
            place + 2 + digit: facts[name][digit]
            for place, name in zip(asked, names, strict=True)
            for digit in (0, 1)
        }
        if far:  # the first question's digits, which nothing else in the segment tells
            assert wanted == dict(list(answers.items())[:2])
        else:
            assert wanted == answers | {
                place + 1: name[1] for place, name in zip(asked, names, strict=True)
            }
    assert len(orders) == 6  # a model cannot go by the order of the facts


@pytest.mark.parametrize(("segments", "far"), [(4, False), (3, True), (9, True)])
def test_an_overwritten_fact_is_asked_for_by_its_later_value(segments, far):
    first_query = memory.FILLERS + memory.KEYS * memory.VALUES
    for row, wanted in rows("overwritten", segments, far):
        facts = [
            (place, divmod(token - memory.FILLERS, memory.VALUES))
            for place, token in enumerate(row)
        ]
        facts = [(place, fact) for place, fact in facts if 0 <= fact[0] < memory.KEYS]
        assert (
            len(facts) == 8
            and len(wanted) == 4
            and all(place // 16 < segments - 1 for place, _ in facts)
        )
        latest = dict(fact for _, fact in facts)
        assert len(latest) == 4 and len({fact for _, fact in facts}) == 8
        assert {place // 16 for place in wanted} == {segments - 1}
        for place, label in wanted.items():
            assert label == first_query + memory.KEYS + latest[row[place] - first_query]
        if far:
            assert {place // 16 for place, _ in facts} == {0, 1}


@pytest.mark.slow
@torch.inference_mode()
def test_a_measurement_is_that_of_the_whole_rows_at_once(monkeypatch):
    # Below a row's 128 tokens, so each row is read by itself in two pieces.
    monkeypatch.setattr(memory, "PIECE", 64)
    task = memory.TASKS["recall"]
    with torch.inference_mode(False):
        model, _ = memory.train(
            replace(task, recipe=replace(task.recipe, steps=150)),
            memory.MEMORIES["linear"],
            seed=0,
        )
    generator = torch.Generator().manual_seed(10_007)
    inputs, labels = map(
        torch.cat,
        zip(*(task.rows(1, 8, generator, True) for _ in range(50)), strict=True),
    )
    asked = labels != memory.IGNORE_INDEX
    right = (model(inputs).argmax(dim=-1) == labels)[asked].float().mean().item()
    assert (
        memory.measure(task, model, 7, 50)["whole"] == pytest.approx(right)
        and right > 0
    )


@pytest.mark.slow
def test_recall_beyond_the_trained_length():
    model, _ = memory.train(
        memory.TASKS["recall"], memory.MEMORIES["linear"], seed=0, until=750
    )
    assert memory.measure(memory.TASKS["recall"], model, 32)["whole"] > 0.9
    model.use_memory(False)
    assert memory.measure(memory.TASKS["recall"], model, 4)["whole"] < 0.12
