"""All patches: which a run needs, and how a worker applies them."""

import logging
from collections.abc import Iterable, Mapping

from packaging.specifiers import SpecifierSet

from infini_llama.tasks.patch_environment.patches import (
    adam_weight_decay,
    flash_attn_import,
    inductor_threads,
    rendezvous,
)
from infini_llama.tasks.patch_environment.patches.patch import Patch

log = logging.getLogger("infini_llama.environment")
PATCHES = (
    rendezvous.PATCH,
    flash_attn_import.PATCH,
    inductor_threads.PATCH,
    adam_weight_decay.PATCH,
)


def needed_patches(versions: Mapping[str, str]) -> list[Patch]:
    """The patches whose faults the installed packages have.

    Args:
        versions: of packages, by name.
    """
    return [patch for patch in PATCHES if _has_fault(patch, versions)]


def apply(names: Iterable[str]) -> None:
    """Apply the patches of these names to this process, in the registry's order.

    Raises:
        ValueError: a patch of such a name does not exist.
    """
    names = set(names)
    if unknown := names - {patch.name for patch in PATCHES}:
        raise ValueError(
            f"there is no patch {', '.join(sorted(unknown))}; the plan was written by another version of infini-llama."
        )
    for patch in PATCHES:
        if patch.name in names:
            patch.apply()
            log.info("applied patch %s to this process (%s)", patch.fault.rstrip("."), patch.reference)


def _has_fault(patch: Patch, versions: Mapping[str, str]) -> bool:
    if not patch.package:
        return True
    version = versions.get(patch.package)
    return version is not None and SpecifierSet(patch.versions).contains(version, prereleases=True)
