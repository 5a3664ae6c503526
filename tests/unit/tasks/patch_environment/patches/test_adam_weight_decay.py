"""weight_decay=None, in the constructor and in a parameter group."""

import pytest

NONE = [
    f"{optimizer}({arguments})"
    for optimizer in ("Adam", "AdamW")
    for arguments in ("[weight], weight_decay=None", "[{'params': [weight], 'weight_decay': None}]")
]
NUMBER = "AdamW([{'params': [weight], 'weight_decay': 0.3}], weight_decay=0.1)"
STEPS = f"""
import torch
from torch.optim import Adam, AdamW
for call in {[*NONE, NUMBER]}:
    weight = torch.nn.Parameter(torch.ones(3))
    try:
        optimizer = eval(call)
        weight.grad = torch.ones(3)
        optimizer.step()
    except TypeError as error:
        print("TypeError", "None" in str(error))
    else:
        print(optimizer.param_groups[0]["weight_decay"], weight.tolist() != [1.0] * 3, isinstance(optimizer, AdamW))
"""


@pytest.mark.parametrize(
    ("patches", "of_none"),
    [
        ([], ["TypeError True"] * 4),
        (["adam-weight-decay"], ["0.0 True False"] * 2 + ["0.0 True True"] * 2),
    ],
)
def test_none_fails_without_the_patch_and_is_zero_with_it_and_a_number_stays_what_it_is(run, patches, of_none):
    done = run(STEPS, *patches)
    assert done.stdout.splitlines() == [*of_none, "0.3 True True"], done.stderr
