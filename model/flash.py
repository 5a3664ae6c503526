"""The functions that only some GPUs and installations have, each imported when it is first asked for, and nowhere else.

flash-attn 2 (Dao 2023, arXiv 2307.08691) is `flash_attn`; torch has FlashAttention for rows of several lengths of its own.
"""

# pyright: reportUnknownVariableType=false
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

PLACES = {
    "varlen": ("torch.nn.attention.varlen", "varlen_attn"),
    "flash2": ("flash_attn", "flash_attn_varlen_func"),
}


@cache
def function_of(backend: str) -> Callable[..., Any]:
    """The function itself: that its package is installed says nothing.

    Raises:
        RuntimeError: it cannot be imported, with the reason.
    """
    module, name = PLACES[backend]
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:  # OSError: a shared library that does not fit this machine
        raise RuntimeError(f"attention backend {backend} is not available: {module}.{name} ({error})") from error


def attend(
    backend: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    dropout: float,
) -> torch.Tensor:
    """Causal attention inside each stretch of flattened tokens.

    Args:
        q: [tokens, H, d]; k, v: [tokens, Hkv, d].
        boundaries: int32, where stretches begin, and the number of tokens.
        longest: upper bound of a stretch.

    Returns:
        [tokens, H, d].
    """
    function = function_of(backend)
    if backend == "varlen":
        grouped = q.shape[1] != k.shape[1]
        return function(q, k, v, boundaries, boundaries, longest, longest, window_size=(-1, 0), enable_gqa=grouped)
    return function(q, k, v, boundaries, boundaries, longest, longest, dropout_p=dropout, causal=True)
