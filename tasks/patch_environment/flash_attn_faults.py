"""Why flash-attn cannot be imported, from what the linker says."""

import platform
import re

REBUILD = (
    "pip install --no-build-isolation --no-binary=flash-attn --force-reinstall "
    "--no-deps flash-attn"
)

# Patterns of the linker's messages, and their causes with the groups of the pattern.
CAUSES = (
    (
        r"GLIBC_([\d.]+)",
        "it was built on a system with glibc {} and this one has {installed}; "
        f"build it here ({REBUILD}), "
        "or leave environment.attention_backend at auto to train without it",
    ),
    (
        r"GLIBCXX_|CXXABI_",
        "it was built with a newer C++ library than this system's; "
        f"build it here ({REBUILD}), or train without it",
    ),
    (
        r"lib(?:cudart|cublas\w*|nvrtc|cudnn\w*)\.so\.([\d.]*\d)",
        "it was built for CUDA {}, which is not installed here; "
        "install a build for the CUDA of this torch, or train without it",
    ),
    # The other package leaves an empty namespace of that name.
    (
        "module 'flash_attn' has no attribute",
        "another package has a folder of that name; install flash-attn",
    ),
    (
        "undefined symbol",
        "it was built for another torch than the one installed; "
        f"build it here ({REBUILD}), or train without it",
    ),
)


def import_failure_cause(message: str) -> str:
    """Why flash-attn cannot be imported, from the linker's message.

    Cause and fix on one line; the message itself where it is not known.
    """
    message = " ".join(message.split())
    installed = platform.libc_ver()[1] or "an older one"
    for pattern, cause in CAUSES:
        found = re.search(pattern, message)
        if found:
            return cause.format(*found.groups(), installed=installed)
    return message
