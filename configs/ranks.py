"""How a run's workers share its work."""

from typing import Any


def groups_of(train: dict[str, Any], workers: int) -> int:
    """Groups of workers that have rows of their own, among which a global batch is split; at least 1."""
    return max(1, workers // train["context_parallel"])
