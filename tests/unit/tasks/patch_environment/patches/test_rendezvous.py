"""A worker that is started by hand."""

import pytest

GATHER = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print(int(one), os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])
"""


def test_without_its_variables_a_process_group_fails_and_with_the_patch_it_is_a_group_of_one(run):
    without, patched = run(GATHER), run(GATHER, "rendezvous")
    assert without.returncode == 1 and "RANK" in without.stderr
    assert patched.stdout.split() == ["1", "0", "1", "0"], patched.stderr


def test_what_torchrun_set_stays(run):
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    code = f"import os; print(*(os.environ[name] for name in {list(given)}))"
    assert run(code, "rendezvous", **given).stdout.split() == list(given.values())


@pytest.mark.parametrize("given", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "1"}])
def test_a_part_of_several_workers_is_refused_in_a_sentence(run, given):
    refused = run("", "rendezvous", **given)
    assert refused.returncode == 1 and "WORLD_SIZE=2 but" in refused.stderr and "torchrun" in refused.stderr
