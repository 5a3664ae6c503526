"""The cases of benchmarks/gpu that compare this GPU with the CPU, and a killed run with an uninterrupted one."""

import pytest

from support.benchmarks import program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
CASES = program("gpu/part_correctness").CASES | {"masks": program("gpu/part_data").CASES["masks"]}


@pytest.mark.parametrize("name", CASES)
def test_every_row_of_a_case_passes(name):
    rows = CASES[name].function("cuda", False)
    unavailable = [row for row in rows if "error" in row]  # a backend whose package is not installed
    assert len(rows) > len(unavailable)
    assert not [row for row in rows if row not in unavailable and not row["passed"]]
