"""The documents that are validation text."""

import math

import numpy as np


def is_held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Whether each document is validation text, bool [n].

    Content alone decides, so that adding files moves none.

    Args:
        hashes: of the documents, uint8 [n, 16].
        share: share of documents that are validation text.
    """
    leading = np.ascontiguousarray(hashes[:, :8]).view(">u8")[:, 0]
    if share >= 1:
        return np.ones(len(leading), dtype=bool)
    return leading < np.uint64(math.ceil(share * 2**64))
