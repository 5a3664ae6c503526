"""What a patch says of itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One fault and its cure.

    fault: a sentence. reference: where it is described upstream. package, versions: a distribution and the versions of it that
    have the fault, as a version specifier ("" for all); package "" is a fault that no version cures. wanted: whether a run of
    this (configuration, facts of `probe`) can meet the fault at all. apply: mends it in this process; may run before torch is
    imported, and is harmless where the fault is absent.
    """

    name: str
    fault: str
    reference: str
    package: str
    versions: str
    wanted: Callable[[dict, dict], bool]
    apply: Callable[[], None]

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "fault": self.fault, "reference": self.reference}
