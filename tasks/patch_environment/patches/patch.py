"""A patch: one fault of a package and its fix."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One fault and its fix.

    Attributes:
        fault: one sentence; reference: where it is described upstream.
        package, versions: a distribution and the versions of it that have the fault, as a version specifier ("": all). Without a
            package the fault does not depend on a version.
        apply: fixes it in this process. It may run before torch is imported, and is harmless where the fault is absent.
    """

    name: str
    fault: str
    reference: str
    package: str
    versions: str
    apply: Callable[[], None]
