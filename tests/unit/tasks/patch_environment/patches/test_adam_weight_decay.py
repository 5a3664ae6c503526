"""weight_decay=None, in the constructor and in a parameter group."""

import pytest

STEP = """
import torch
from torch.optim import Adam, AdamW
weight = torch.nn.Parameter(torch.ones(3))
optimizer = {call}
weight.grad = torch.ones(3)
optimizer.step()
print(optimizer.param_groups[0]["weight_decay"], weight.tolist() != [1.0, 1.0, 1.0], isinstance(optimizer, AdamW))
"""


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW"])
@pytest.mark.parametrize("arguments", ["[weight], weight_decay=None", "[{'params': [weight], 'weight_decay': None}]"])
def test_none_fails_without_the_patch_and_is_zero_with_it(run, optimizer, arguments):
    code = STEP.format(call=f"{optimizer}({arguments})")
    without, patched = run(code), run(code, "adam-weight-decay")
    assert without.returncode == 1 and "TypeError" in without.stderr and "None" in without.stderr
    assert patched.stdout.split() == ["0.0", "True", str(optimizer == "AdamW")], patched.stderr


def test_a_number_stays_what_it_is(run):
    code = STEP.format(call="AdamW([{'params': [weight], 'weight_decay': 0.3}], weight_decay=0.1)")
    assert run(code, "adam-weight-decay").stdout.split()[0] == "0.3"
