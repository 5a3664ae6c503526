"""How a run's workers share its work."""

from typing import Any


def ranks_a_row(train: dict[str, Any]) -> int:
    """Workers that compute the same rows together, each its part; other groups of so many have rows of their own."""
    return train["context_parallel"]


def groups_of(train: dict[str, Any], workers: int) -> int:
    """Groups of workers that have rows of their own, among which a global batch is split; at least 1."""
    return max(1, workers // ranks_a_row(train))
