"""Why a compiled package such as flash-attn cannot be imported, from the message of the linker."""

import platform
import re

REBUILD = "pip install --no-build-isolation --no-binary=flash-attn --force-reinstall --no-deps flash-attn"


def explain(message: str) -> str:
    """The cause and the fix, on one line; the message itself where it is not a known one."""
    message = " ".join(message.split())
    if found := re.search(r"GLIBC_([\d.]+)", message):
        here = platform.libc_ver()[1] or "an older one"
        return (
            f"it was built on a system with glibc {found[1]} and this one has {here}; build it here ({REBUILD}), "
            "or leave environment.attention_backend at auto to train without it"
        )
    if re.search(r"GLIBCXX_|CXXABI_", message):
        return (
            f"it was built with a newer C++ library than this system's; build it here ({REBUILD}), or train without it"
        )
    if found := re.search(r"lib(?:cudart|cublas\w*|nvrtc|cudnn\w*)\.so\.([\d.]+)", message):
        return (
            f"it was built for CUDA {found[1].rstrip('.')}, which is not installed here; install a build for the CUDA of this "
            "torch, or train without it"
        )
    if "module 'flash_attn' has no attribute" in message:  # the other one leaves an empty namespace of that name
        return "another package has a folder of that name; install flash-attn"
    if "undefined symbol" in message or "DLL load failed" in message:
        return f"it was built for another torch than the one installed; build it here ({REBUILD}), or train without it"
    return message
