"""The choice of a token: by hand, and against transformers' processors of logits."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from infini_llama.model.generate import Sampling, choose, keep_likely


@pytest.mark.parametrize("seed", range(5))
def test_equals_transformers(seed):
    """Their processors in the order that their generate applies them."""
    torch.manual_seed(seed)
    logits, ids = torch.randn(1, 97) * 3, torch.randint(0, 97, (1, 20))
    sampling = Sampling(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.3
    )
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ]
    )(ids, logits.clone())[0]
    seen = torch.zeros(97, dtype=torch.bool)
    seen[ids[0]] = True
    drawn = {
        choose(logits[0], seen, sampling, torch.Generator().manual_seed(number))
        for number in range(3000)
    }
    likely = theirs.softmax(0)
    assert drawn <= set(theirs.isfinite().nonzero()[:, 0].tolist())
    assert {int(token) for token in (likely > 0.01).nonzero()} <= drawn
    penalised = torch.where(
        seen, torch.where(logits[0] > 0, logits[0] / 1.3, logits[0] * 1.3), logits[0]
    )
    assert torch.allclose(keep_likely(penalised / 0.7, 40, 0.9, 0.05), theirs)


@pytest.mark.parametrize(
    ("limits", "theirs"),
    [
        ({"top_k": 1}, TopKLogitsWarper(1)),
        ({"top_k": 7}, TopKLogitsWarper(7)),
        ({"top_p": 0.01}, TopPLogitsWarper(0.01)),
        ({"top_p": 0.5}, TopPLogitsWarper(0.5)),
        ({"top_p": 0.999}, TopPLogitsWarper(0.999)),
        ({"min_p": 0.01}, MinPLogitsWarper(0.01)),
        ({"min_p": 0.3}, MinPLogitsWarper(0.3)),
        ({"min_p": 1.0}, MinPLogitsWarper(1.0)),
    ],
)
def test_each_sampling_limit_equals_transformers(limits, theirs):
    torch.manual_seed(0)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for spread in (0.1, 1.0, 3.0, 10.0):
        for logits in torch.randn(20, 97) * spread:
            expected: torch.Tensor = theirs(ids, logits[None].clone())[0]
            assert torch.equal(keep_likely(logits, **limits), expected)
    assert keep_likely(torch.zeros(5), 2).isfinite().sum() == 2  # ties do not widen it


def test_choices_follow_the_probabilities():
    logits, seen = torch.tensor([0.5, 0.3, 0.2]).log(), torch.zeros(3, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    hot = Sampling(temperature=1.0)
    drawn = torch.tensor(
        [choose(logits, seen, hot, generator) for _ in range(4000)]
    ).bincount(minlength=3)
    assert (drawn / 4000 - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.03
    assert choose(logits, seen, Sampling(), generator) == 0
    assert {
        choose(logits, seen, Sampling(temperature=0.05), generator) for _ in range(50)
    } == {0}


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 5e-324, 1e300])
def test_temperatures_at_the_limits_of_floats(temperature):
    logits, seen = torch.tensor([-20.0, 30.0, 10.0]), torch.zeros(3, dtype=torch.bool)
    drawn = {
        choose(
            logits,
            seen,
            Sampling(temperature=temperature),
            torch.Generator().manual_seed(seed),
        )
        for seed in range(50)
    }
    assert drawn == ({1} if temperature < 1 else {0, 1, 2})


@pytest.mark.parametrize("penalty", [1e-320, 1e-38, 1e300])
def test_penalties_at_the_limits_of_floats(penalty):
    """The smallest makes a token that was seen infinitely likely, the largest impossible."""
    logits, seen = torch.tensor([2.0, 3.0, -1.0]), torch.tensor([True, False, True])
    sampling = Sampling(temperature=1e-3, repetition_penalty=penalty)
    assert choose(logits, seen, sampling, torch.Generator()) == (
        0 if penalty < 1 else 1
    )


def test_a_top_p_of_one_keeps_every_token():
    """Rounded sums of many probabilities reach 1 before the last of them."""
    logits = torch.linspace(0, -30, 50_000)
    assert keep_likely(logits, top_p=1.0).isfinite().all()


def test_a_penalty_holds_for_the_likeliest_as_well():
    logits, seen = torch.tensor([2.0, 1.9, -1.0]), torch.tensor([True, False, False])
    generator = torch.Generator()
    assert choose(logits, seen, Sampling(repetition_penalty=1.1), generator) == 1
    negative = torch.tensor([-1.0, -1.05, -9.0])
    assert choose(negative, seen, Sampling(repetition_penalty=1.1), generator) == 1
