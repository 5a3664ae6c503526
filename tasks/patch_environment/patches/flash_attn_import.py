"""flash-attn that warns while it is imported, or cannot be: both told once, in words."""

import importlib.util
import logging
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from infini_llama.tasks.patch_environment.flash_faults import in_words
from infini_llama.tasks.patch_environment.patches.patch import Patch

log = logging.getLogger("infini_llama.environment")


class _InWords(MetaPathFinder):
    """Lets everybody else find flash_attn, and stands beside while it is executed."""

    def __init__(self) -> None:
        self.asking = self.told = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "flash_attn" or self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.asking = False
        if (
            spec is not None and spec.loader is not None and spec.origin is not None
        ):  # no namespace of flash-attn-4 alone
            self._stand_beside(spec)
        return spec

    def _stand_beside(self, spec: ModuleSpec) -> None:
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
            self._tell(fault, [str(warning.message) for warning in caught])
            if fault is not None:
                raise ImportError(in_words(str(fault)), name="flash_attn") from fault

        spec.loader.exec_module = exec_module

    def _tell(self, fault: Exception | None, messages: list[str]) -> None:
        if self.told:
            return
        self.told = True
        if fault is not None:
            log.warning("flash-attn cannot be imported: %s", in_words(str(fault)))
        elif messages:
            first = messages[0].splitlines()[0]
            log.info("flash-attn warned %d time(s) while it was imported, first: %s", len(messages), first)


def apply() -> None:
    if not any(isinstance(finder, _InWords) for finder in sys.meta_path):
        sys.meta_path.insert(0, _InWords())


PATCH = Patch(
    name="flash-attn-import",
    fault="flash-attn fails to be imported with the linker's words (GLIBC_2.32 not found, undefined symbol, libcudart.so.11.0), "
    "and warns of torch's deprecated functions at every import; both are told once.",
    reference="https://github.com/Dao-AILab/flash-attention/issues/1708",
    package="flash-attn",
    versions="",
    wanted=lambda config, facts: True,
    apply=apply,
)
