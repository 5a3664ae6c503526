"""Which patches a run needs, and what each does: in two processes, one without and one with it."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from infini_llama.tasks.patch_environment.flash_attn_faults import import_failure_cause
from infini_llama.tasks.patch_environment.patches import (
    PATCHES,
    apply,
    needed_patches,
)

OLD = {"torch": "2.12.1", "flash-attn": "2.8.3"}
NEW = {"torch": "2.13.0+cpu"}


def test_a_patch_is_planned_for_the_versions_that_have_its_fault():
    assert {patch.name for patch in needed_patches(OLD)} == {
        patch.name for patch in PATCHES
    }
    assert {patch.name for patch in needed_patches(NEW)} == {
        "rendezvous",
        "adam-weight-decay",
    }


def test_each_patch_names_its_fault_and_a_reference():
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert patch.fault.endswith(".") and patch.reference.startswith("https://")


def test_a_patch_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="nonsense"):
        apply(["nonsense"])


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("libcudart.so.11.0: cannot open shared object file", "built for CUDA 11.0"),
        ("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda", "another torch"),
        ("version `GLIBCXX_3.4.32' not found", "newer C++ library"),
        ("version `GLIBC_2.38' not found", "glibc 2.38"),
        ("something\n  else", "something else"),
    ],
)
def test_each_known_import_error_is_explained(message, cause):
    assert cause in import_failure_cause(message) and "\n" not in import_failure_cause(
        message
    )


def program(
    code: str, patch: str | None, variables: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """A command and its environment: `code`, after the patch of this name where one is given."""
    before = (
        f"from infini_llama.tasks.patch_environment.patches import apply\napply([{patch!r}])\n"
        if patch
        else ""
    )
    unset = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TOKENIZERS_PARALLELISM",
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in unset
    }
    return [sys.executable, "-c", before + code], environment | variables


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess]:
    """Runs `code` in a fresh interpreter."""

    def start(
        code: str, patch: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess:
        command, environment = program(code, patch, variables)
        return subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    return start


@pytest.fixture
def run_with_torch(server, tmp_path) -> Callable[..., tuple[int, str]]:
    """Runs `code` in a process that has torch; its exit code and what it printed."""

    def start(code: str, patch: str | None = None) -> tuple[int, str]:
        ended = server.run(*program(code, patch, {}), tmp_path / "printed")
        return ended, (tmp_path / "printed").read_text()

    return start


# weight_decay=None, in the constructor and in a parameter group

NONE = [
    f"{optimizer}({arguments})"
    for optimizer in ("Adam", "AdamW")
    for arguments in (
        "[weight], weight_decay=None",
        "[{'params': [weight], 'weight_decay': None}]",
    )
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
def test_weight_decay_none_fails_without_the_patch_and_is_zero_with_it(
    run_with_torch, patches, of_none
):
    assert run_with_torch(STEPS, *patches)[1].splitlines() == [
        *of_none,
        "0.3 True True",
    ]


# a package called flash_attn that fails or warns as the real one does

GLIBC = "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.32' not found (required by flash_attn_2_cuda.so)"
TRY = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
for attempt in range(2):
    try:
        import flash_attn
        print("imported", flash_attn.flash_attn_func)
    except ImportError as error:
        print("refused", error)
"""


@pytest.fixture
def package(tmp_path):
    def write(text: str) -> str:
        folder = tmp_path / "flash_attn"
        folder.mkdir()
        (folder / "__init__.py").write_text(text)
        return f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"

    return write


def test_a_linker_message_is_reported_once(run, package):
    path = package(f"raise ImportError({GLIBC!r})")
    without, patched = (
        run(TRY, PYTHONPATH=path),
        run(TRY, "flash-attn-import", PYTHONPATH=path),
    )
    assert (
        without.stdout.count(f"refused {GLIBC}") == 2 and "glibc" not in without.stdout
    )
    assert (
        patched.stdout.count(
            "refused it was built on a system with glibc 2.32 and this one has"
        )
        == 2
    )
    assert (
        patched.stderr.count("WARNING flash-attn cannot be imported: it was built on")
        == 1
    )


def test_warnings_while_it_is_imported_become_one_line(run, package):
    text = "import warnings\nfor i in range(3): warnings.warn(f'custom_fwd {i} is deprecated', FutureWarning)\nflash_attn_func = 7"
    path = package(text)
    without, patched = (
        run(TRY, PYTHONPATH=path),
        run(TRY, "flash-attn-import", PYTHONPATH=path),
    )
    assert without.stderr.count("FutureWarning:") == 3
    assert (
        patched.stderr.count("deprecated") == 1 and "warned 3 time(s)" in patched.stderr
    )
    assert patched.stdout == without.stdout == "imported 7\n" * 2


def test_flash_attn_4_only_and_no_flash_attn_are_unchanged(run, tmp_path):
    nothing = run(TRY, "flash-attn-import")
    assert nothing.stdout.count(
        "refused No module named 'flash_attn'"
    ) == 2 and not nothing.stderr.count("WARNING")
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("here = 1")
    code = "import flash_attn.cute; print(flash_attn.cute.here, hasattr(flash_attn, 'flash_attn_func'))"
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    assert run(code, "flash-attn-import", PYTHONPATH=path).stdout.split() == [
        "1",
        "False",
    ]


# a worker that is started by hand

GATHER = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print(int(one), os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])
"""


def test_the_patch_makes_a_process_without_variables_a_group_of_one(run_with_torch):
    code, printed = run_with_torch(GATHER)
    assert code == 1 and "RANK" in printed
    assert run_with_torch(GATHER, "rendezvous") == (0, "1 0 1 0\n")


def test_variables_of_torchrun_are_kept(run):
    given = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }
    code = f"import os; print(*(os.environ[name] for name in {list(given)}))"
    assert run(code, "rendezvous", **given).stdout.split() == list(given.values())


@pytest.mark.parametrize(
    "given", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "1"}]
)
def test_a_part_of_several_workers_is_refused_in_a_sentence(run, given):
    refused = run("", "rendezvous", **given)
    assert (
        refused.returncode == 1
        and "WORLD_SIZE=2 but" in refused.stderr
        and "torchrun" in refused.stderr
    )


# compiled code of two threads that is offered to a worker of one

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
def test_only_with_the_patch_old_torch_compiles_for_each_thread_count(run, tmp_path):
    older = COMPILE.format(older=AS_BEFORE_2_13)

    def hits(code: str, threads: int, patch: str | None) -> str:
        variables = {
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"{patch}"),
        }
        return run(code, patch, **variables).stdout.split()[-1]

    assert [hits(older, threads, None) for threads in (2, 1)] == ["0", "1"], (
        "one thread was given the code of two"
    )
    assert [hits(older, threads, "inductor-threads") for threads in (2, 1, 1)] == [
        "0",
        "0",
        "1",
    ]


def test_each_number_of_threads_has_a_folder_of_its_own(run):
    code = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    for threads in ("1", "2"):
        variables = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_CACHE_DIR": "/cache"}
        assert (
            run(code, "inductor-threads", **variables).stdout.strip()
            == f"/cache/threads-{threads}"
        )
        assert run(code, **variables).stdout.strip() == "/cache"
