"""How a run's workers share its work."""

from typing import Any


def groups_of(train: dict[str, Any], workers: int) -> int:
    """Groups of workers that have rows of their own, among which a global batch is split; at least 1."""
    return max(1, workers // train["context_parallel"])


def shards_of(train: dict[str, Any], workers: int, workers_per_node: int) -> int:
    """Workers that share one copy of the model; 1 where each has its own."""
    if train["parallel"] in ("ddp", "deepspeed"):  # of ZeRO, what every stage fits into
        return 1
    if train["parallel"] == "fsdp":
        return workers
    return workers_per_node if train["shard_size"] == "auto" else train["shard_size"]
