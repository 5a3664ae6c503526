"""How a run's workers share its work."""

from typing import Any


def ranks_a_row(train: dict[str, Any]) -> int:
    """Workers that compute the same rows together, each its part; other groups of so many have rows of their own."""
    return train["context_parallel"] * train["tensor_parallel"]


def sharing(train: dict[str, Any]) -> str:
    """The setting by which they do, 'train.tensor_parallel=2'; only one of the two is ever more than 1."""
    key = "tensor_parallel" if train["tensor_parallel"] > 1 else "context_parallel"
    return f"train.{key}={train[key]}"


def groups_of(train: dict[str, Any], workers: int) -> int:
    """Groups of workers that have rows of their own, among which a global batch is split; at least 1."""
    return max(1, workers // ranks_a_row(train))
