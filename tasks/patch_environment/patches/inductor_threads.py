"""Compiled CPU code that was made for another number of threads."""

import os
from pathlib import Path

from infini_llama.tasks.patch_environment.patches.patch import Patch


def apply() -> None:
    """Gives code for each number of threads a cache of its own. Before torch is imported, which reads the variable."""
    threads = os.environ.get("OMP_NUM_THREADS")
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if threads and folder and Path(folder).name != f"threads-{threads}":
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, f"threads-{threads}"))


PATCH = Patch(
    name="inductor-threads",
    fault="torch.compile takes CPU code out of its cache that was compiled for another number of threads, and runs it with that "
    "number; each number gets a cache of its own.",
    reference="https://github.com/pytorch/pytorch/pull/185049",
    package="torch",
    versions="<2.13",
    apply=apply,
)
