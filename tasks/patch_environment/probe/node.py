"""A machine that cannot be asked: a node of a cluster on which a job will train, by what the configuration says of it."""

from typing import Any

BF16_FROM, FP8_FROM = [8, 0], [8, 9]  # compute capability


def of_node(facts: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """The facts of this machine, with those of `environment.node` in their place where it has a word about them.

    Which GPUs a job gets is for the cluster to say, so that nobody else computes on them as far as the plan is concerned.
    """
    changed = facts | {"gpus": [gpu | {"busy": None, "processes": []} for gpu in facts["gpus"]]}
    if node["gpus"] is not None:
        changed |= {"gpus": [_gpu(node) for _ in range(node["gpus"])], "nccl": node["gpus"] > 0, "driver": None}
        changed.pop("gpu_fault", None)
    if node["cores"] is not None:
        changed["cores"] = node["cores"]
    if node["memory"] is not None:
        changed["memory"] = {"total": node["memory"], "available": node["memory"], "limit": "machine"}
    return changed


def _gpu(node: dict[str, Any]) -> dict[str, Any]:
    capability = [int(part) for part in node["gpu_capability"].split(".")]
    known = {"name": f"GPU of capability {node['gpu_capability']}", "capability": capability, "uuid": "", "mig": False}
    known |= {"memory": node["gpu_memory"], "free": node["gpu_memory"], "busy": None, "processes": []}
    return known | {"bf16": capability >= BF16_FROM, "fp8": capability >= FP8_FROM}
