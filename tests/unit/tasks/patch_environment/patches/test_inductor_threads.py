"""Compiled code of two threads that is offered to a worker of one."""

import pytest

# torch 2.13 asks this function whether the number of threads is part of the cache's key; older versions do not have it.
AS_BEFORE_2_13 = """
from torch._inductor.codecache import FxGraphHashDetails
FxGraphHashDetails._may_generate_cpu_cpp_code = lambda *arguments: False
"""
COMPILE = """
import os, torch
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
{older}
torch.compile(lambda x: (x.sin() + 1).sum(-1))(torch.ones(512, 512))
from torch._dynamo.utils import counters
print(dict(counters["inductor"]).get("fxgraph_cache_hit", 0))
"""


@pytest.mark.slow
def test_without_the_patch_an_older_torch_runs_code_of_another_number_of_threads(run, tmp_path):
    older = COMPILE.format(older=AS_BEFORE_2_13)

    def hits(code: str, threads: int, patch: str | None) -> str:
        variables = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"{patch}")}
        return run(code, patch, **variables).stdout.split()[-1]

    assert [hits(older, threads, None) for threads in (2, 1)] == ["0", "1"], "one thread was given the code of two"
    assert [hits(older, threads, "inductor-threads") for threads in (2, 1, 1)] == ["0", "0", "1"]


def test_each_number_of_threads_has_a_folder_of_its_own(run):
    code = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    for threads in ("1", "2"):
        variables = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_CACHE_DIR": "/cache"}
        assert run(code, "inductor-threads", **variables).stdout.strip() == f"/cache/threads-{threads}"
        assert run(code, **variables).stdout.strip() == "/cache"
