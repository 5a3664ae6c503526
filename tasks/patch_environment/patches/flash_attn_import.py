"""flash-attn that warns while it is imported or cannot be imported: one log line with the cause."""

import importlib.util
import logging
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from infini_llama.tasks.patch_environment.patches.flash_faults import explain
from infini_llama.tasks.patch_environment.patches.patch import Patch

log = logging.getLogger("infini_llama.environment")


class _FlashAttnFinder(MetaPathFinder):
    """Finds flash_attn through the other finders, and catches the warnings and errors of its import."""

    def __init__(self) -> None:
        self.searching = self.logged = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "flash_attn" or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None and spec.origin is not None:  # no namespace of another package
            self._catch_faults(spec)
        return spec

    def _catch_faults(self, spec: ModuleSpec) -> None:
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            fault: Exception | None = None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    execute(module)
                except (ImportError, OSError) as error:  # OSError: a shared library that does not fit this machine
                    fault = error
            self._log(fault, [str(warning.message) for warning in caught])
            if fault is not None:
                raise ImportError(explain(str(fault)), name="flash_attn") from fault

        spec.loader.exec_module = exec_module

    def _log(self, fault: Exception | None, messages: list[str]) -> None:
        if self.logged:
            return
        self.logged = True
        if fault is not None:
            log.warning("flash-attn cannot be imported: %s", explain(str(fault)))
        elif messages:
            first = messages[0].splitlines()[0]
            log.info("flash-attn warned %d time(s) while it was imported, first: %s", len(messages), first)


def apply() -> None:
    if not any(isinstance(finder, _FlashAttnFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FlashAttnFinder())


PATCH = Patch(
    name="flash-attn-import",
    fault="flash-attn fails to be imported with the linker's messages (GLIBC_2.32 not found, undefined symbol, libcudart.so.11.0), "
    "and warns of torch's deprecated functions at every import; both are logged once, with the cause.",
    reference="https://github.com/Dao-AILab/flash-attention/issues/1708",
    package="flash-attn",
    versions="",
    apply=apply,
)
