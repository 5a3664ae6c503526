"""Two environments, and whether a run that goes from one to the other stays bitwise the same."""

from typing import Any

from infini_llama.tasks.patch_environment.pin import BEFORE, EXACT

# Versions that decide how numbers come about; of the others, only what a run reads and reports.
NUMERIC = ("torch", "numpy", "flash-attn", "flash-attn-4", "triton")
LOST, DOUBTFUL, KEPT = "lost", "doubtful", "kept"


def differences(plan_then: dict, facts_then: dict, plan: dict | None, facts: dict) -> list[dict[str, Any]]:
    """What differs between an environment of the past and this one, most harmful first.

    Args:
        plan: None compares the machines alone.

    Returns:
        {"name", "then", "now", "exactness": lost | doubtful | kept, "sentence"} for each difference.
    """
    found = []
    for name, loss in EXACT.items():
        if plan is not None and name in ("nproc_per_node", "nnodes") and _workers(plan_then) == _workers(plan):
            continue  # the ranks lie otherwise on machines, and are the same
        before = plan_then.get(name, BEFORE.get(name))
        if plan is not None and before is not None and plan[name] != before:
            found.append(
                _difference(name, before, plan[name], LOST, f"the result is no longer bitwise the same ({loss})")
            )
    for name, then, now in _decisive(facts_then, facts):
        if then != now:
            found.append(_difference(name, then, now, DOUBTFUL, "the result may no longer be bitwise the same"))
    for name, then, now in _harmless(facts_then, facts):
        if then != now:
            found.append(_difference(name, then, now, KEPT, "this does not touch the result"))
    order = (LOST, DOUBTFUL, KEPT)
    return sorted(found, key=lambda one: order.index(one["exactness"]))


def _workers(plan: dict) -> int | None:
    """Of all nodes together; None where it is not known."""
    return plan["nproc_per_node"] * plan.get("nnodes", BEFORE["nnodes"]) if "nproc_per_node" in plan else None


def _difference(name: str, then: Any, now: Any, exactness: str, sentence: str) -> dict[str, Any]:
    return {"name": name, "then": then, "now": now, "exactness": exactness, "sentence": sentence}


def _decisive(then: dict, now: dict) -> list[tuple[str, Any, Any]]:
    driver_then, driver_now = ((facts.get("driver") or {}).get("version") for facts in (then, now))
    pairs = [
        ("python", then["python"], now["python"]),
        ("the processor", then["cpu"]["model"], now["cpu"]["model"]),
        ("the list of GPUs", [gpu["name"] for gpu in then["gpus"]], [gpu["name"] for gpu in now["gpus"]]),
        ("the driver", driver_then, driver_now),
    ]
    return pairs + [(name, then["versions"].get(name), now["versions"].get(name)) for name in NUMERIC]


def _harmless(then: dict, now: dict) -> list[tuple[str, Any, Any]]:
    pairs = [(name, then.get(name, now[name]), now[name]) for name in ("host", "platform", "cores")]
    memory = [round(facts["memory"]["total"] / 1024**3) for facts in (then, now)]
    others = sorted((set(then["versions"]) | set(now["versions"])) - set(NUMERIC))
    return [
        *pairs,
        ("memory in GiB", *memory),
        *((name, then["versions"].get(name), now["versions"].get(name)) for name in others),
    ]
