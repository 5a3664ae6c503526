"""Known faults of other packages, fixed in a worker's process while it runs.

Nothing on disk is changed. Each patch is a function with its entry in `PATCHES`; a run plans those
whose faults the installed packages have.
"""

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.patch_environment.flash_attn_faults import (
    import_failure_cause,
)
from infini_llama.tasks.records.plan import PatchSummary

log = logging.getLogger("infini_llama.environment")


@dataclass(frozen=True)
class Patch:
    """One fault and its fix.

    Attributes:
        fault: one sentence; reference: where it is described upstream.
        package, versions: a distribution and the versions of it that have the fault, as a version
            specifier ("": all). Without a package the fault does not depend on a version.
        apply: fixes it in this process. It is called once, may run before torch is imported, and
            is harmless where the fault is absent.
    """

    name: str
    fault: str
    reference: str
    apply: Callable[[], None]
    package: str = ""
    versions: str = ""

    def is_needed(self, installed: Mapping[str, str]) -> bool:
        """Whether the installed packages have the fault."""
        if not self.package:
            return True
        version = installed.get(self.package)
        if version is None:
            return False
        return SpecifierSet(self.versions).contains(version, prereleases=True)

    def summary(self) -> PatchSummary:
        """The part that is written down and shown."""
        return PatchSummary(name=self.name, fault=self.fault, reference=self.reference)


def needed_patches(installed: Mapping[str, str]) -> list[Patch]:
    """The patches whose faults the installed packages have, by their versions."""
    return [patch for patch in PATCHES if patch.is_needed(installed)]


def apply(names: Iterable[str]) -> None:
    """Apply the patches of these names to this process, in the order of `PATCHES`.

    Raises:
        ValueError: a patch of such a name does not exist.
    """
    names = set(names)
    unknown = names - {patch.name for patch in PATCHES}
    if unknown:
        raise ValueError(
            f"there is no patch {', '.join(sorted(unknown))}; "
            "the plan was written by another version of infini-llama."
        )
    for patch in PATCHES:
        if patch.name in names:
            patch.apply()
            fault = patch.fault.rstrip(".")
            log.info("applied patch %s: %s (%s)", patch.name, fault, patch.reference)


def set_rendezvous_variables() -> None:
    """Make a worker that was started by hand the only one of its run; keep what torchrun set.

    Raises:
        ConfigError: only some are set, for a world size above 1, so the other workers cannot be
            found.
    """
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} but {', '.join(missing)} not set: "
            "start several workers by torchrun, or unset WORLD_SIZE for a single one."
        )
    single = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # one that is free
    }
    for name, value in single.items():
        os.environ.setdefault(name, value)


class _FlashAttnFinder(MetaPathFinder):
    """Finds flash_attn on the path, and catches the warnings and errors of its import."""

    logged = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != "flash_attn":
            return None
        spec = PathFinder.find_spec(fullname, path)
        # Absent, or a namespace of another package.
        if spec is None or spec.loader is None or spec.origin is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    execute(module)
                # OSError: a shared library that does not fit this machine.
                except (ImportError, OSError) as error:
                    cause = import_failure_cause(str(error))
                    self.log_once(
                        logging.WARNING, f"flash-attn cannot be imported: {cause}"
                    )
                    raise ImportError(cause, name="flash_attn") from error
            if caught:
                first = str(caught[0].message).splitlines()[0]
                times = f"flash-attn warned {len(caught)} time(s)"
                text = f"{times} while it was imported, first: {first}"
                self.log_once(logging.INFO, text)

        spec.loader.exec_module = exec_module
        return spec

    def log_once(self, level: int, text: str) -> None:
        if not self.logged:
            log.log(level, text)
        self.logged = True


def catch_faults_of_flash_attn() -> None:
    """Log the warnings or the failure of flash-attn's import, as one line with the cause."""
    sys.meta_path.insert(0, _FlashAttnFinder())


def cache_code_by_threads() -> None:
    """Give compiled code for each number of threads its own cache.

    It has to run before torch is imported, which reads the variable.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if threads and folder and Path(folder).name != f"threads-{threads}":
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, f"threads-{threads}"))


def read_no_weight_decay_as_zero() -> None:
    """Let Adam and AdamW take weight_decay=None, in the constructor and in parameter groups."""
    from torch.optim import Adam, AdamW, Optimizer

    def accepting_none(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def with_number(self: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("weight_decay", 0.0) is None:
                kwargs["weight_decay"] = 0.0
            init(self, *args, **kwargs)

        return with_number

    for optimizer in (Adam, AdamW):
        optimizer.__init__ = accepting_none(optimizer.__init__)
    add = Optimizer.add_param_group

    @functools.wraps(add)
    def add_with_number(self: Any, param_group: dict[str, Any]) -> None:
        if isinstance(self, Adam) and param_group.get("weight_decay", 0.0) is None:
            param_group["weight_decay"] = 0.0
        add(self, param_group)

    Optimizer.add_param_group = add_with_number


# Each is needed by a version that pyproject.toml allows: torch from 2.11, flash-attn from 2.8.3.
PATCHES = (
    # Of no version: whoever starts a worker has to set these variables.
    Patch(
        name="rendezvous",
        fault=(
            "A worker that is started by hand ends with KeyError: 'RANK' or 'WORLD_SIZE'; "
            "it becomes the only one of its run."
        ),
        reference=(
            "https://docs.pytorch.org/docs/stable/distributed.html"
            "#environment-variable-initialization"
        ),
        apply=set_rendezvous_variables,
    ),
    # Every flash-attn of the extra: 2.8.3 and its post releases, which are the newest.
    Patch(
        name="flash-attn-import",
        fault=(
            "flash-attn fails to be imported with the linker's messages "
            "(GLIBC_2.32 not found, undefined symbol, libcudart.so.11.0), "
            "and warns of torch's deprecated functions at every import; "
            "both are logged once, with the cause."
        ),
        reference="https://github.com/Dao-AILab/flash-attention/issues/1708",
        apply=catch_faults_of_flash_attn,
        package="flash-attn",
    ),
    # torch 2.11 and 2.12, which are supported.
    Patch(
        name="inductor-threads",
        fault=(
            "torch.compile takes CPU code out of its cache that was compiled for another number "
            "of threads, and runs it with that number; each number gets a cache of its own."
        ),
        reference="https://github.com/pytorch/pytorch/pull/185049",
        apply=cache_code_by_threads,
        package="torch",
        versions="<2.13",
    ),
    # torch 2.13.0 still has it.
    Patch(
        name="adam-weight-decay",
        fault=(
            "Adam and AdamW with weight_decay=None fail: the constructor compares it with a "
            "number, a parameter group with it passes and dies at the first step "
            "(unsupported operand type(s) for *: 'float' and 'NoneType'); it is read as 0."
        ),
        reference="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py",
        apply=read_no_weight_decay_as_zero,
        package="torch",
    ),
)
