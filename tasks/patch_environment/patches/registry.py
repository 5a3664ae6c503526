"""All patches: which a run needs, how a worker applies them, and which have outlived their fault."""

import logging
import re
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from infini_llama.tasks.patch_environment.patches import (
    adam_weight_decay,
    flash_attn_import,
    inductor_threads,
    rendezvous,
    tokenizers_fork,
)
from infini_llama.tasks.patch_environment.patches.patch import Patch

log = logging.getLogger("infini_llama.environment")
PATCHES = (
    rendezvous.PATCH,
    tokenizers_fork.PATCH,
    flash_attn_import.PATCH,
    inductor_threads.PATCH,
    adam_weight_decay.PATCH,
)
OURS = "infini-llama"


def needed(config: dict, facts: dict) -> list[Patch]:
    """The patches for a run of this configuration on the machine of these facts."""
    return [patch for patch in PATCHES if _has_fault(patch, facts["versions"]) and patch.wanted(config, facts)]


def apply(names: list[str]) -> None:
    """Applies the patches of these names to this process, in the registry's order.

    Raises:
        ValueError: there is no patch of such a name.
    """
    if unknown := set(names) - {patch.name for patch in PATCHES}:
        raise ValueError(
            f"no patch is called {', '.join(sorted(unknown))}; the plan is of another version of infini-llama."
        )
    for patch in PATCHES:
        if patch.name in names:
            patch.apply()
            log.info("patched for this process: %s (%s)", patch.fault.rstrip("."), patch.reference)


def removable(patches: tuple[Patch, ...] = PATCHES, allowed: dict[str, SpecifierSet] | None = None) -> list[Patch]:
    """The patches whose fault no version of its package has any more that infini-llama may be installed with.

    Args:
        allowed: the versions of each package that may be installed; None: those that pyproject.toml names.
    """
    declared = _declared() if allowed is None else allowed
    return [
        patch
        for patch in patches
        if patch.package in declared and not _overlap(patch.versions, declared[patch.package])
    ]


def _has_fault(patch: Patch, installed: dict[str, str]) -> bool:
    if not patch.package:
        return True
    version = installed.get(patch.package)
    return version is not None and SpecifierSet(patch.versions).contains(version, prereleases=True)


def _declared() -> dict[str, SpecifierSet]:
    try:
        ours = [Requirement(text) for text in requires(OURS) or []]
    except PackageNotFoundError:
        return {}
    return {need.name: need.specifier for need in ours if need.marker is None or "extra" in str(need.marker)}


def _overlap(faulty: str, allowed: SpecifierSet) -> bool:
    """Whether a version is in both: tried are the versions that either names, and those just below and above them."""
    both = SpecifierSet(faulty) & allowed
    named = [Version(re.sub(r"\.\*$", "", part.version)) for part in both]
    tried = {version.public for version in named}
    for version in named:
        *front, last = version.release
        tried.add(".".join(map(str, (*version.release, 1))))
        if last:
            tried.add(".".join(map(str, (*front, last - 1, 9999))))
    return not tried or any(both.contains(version, prereleases=True) for version in tried)
