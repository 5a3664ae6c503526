"""What one of several ranks that share a model has, draws and keeps; what they compute together is in tests/integration."""

import torch

from infini_llama.model.split import Split


def of(place: int, size: int = 4) -> Split:
    return Split(None, place, size)  # type: ignore[arg-type]


def test_every_word_is_one_ranks_own():
    ids = torch.arange(12).view(3, 4)
    numbers, mine = zip(*(of(place).own(ids, 3) for place in range(4)), strict=True)
    assert torch.stack(mine).sum(dim=0).eq(1).all()
    found = sum((number + place * 3) * there for place, (number, there) in enumerate(zip(numbers, mine, strict=True)))
    assert torch.equal(found, ids)


def test_ranks_draw_apart_and_then_together_again():
    inside, after = [], []
    for place in range(4):
        torch.manual_seed(7)
        with of(place).apart(torch.device("cpu")):
            inside.append(torch.rand(3).tolist())
        after.append(torch.rand(3).tolist())
    assert len({tuple(each) for each in inside}) == 4
    assert all(each == after[0] for each in after) and after[0] not in inside
