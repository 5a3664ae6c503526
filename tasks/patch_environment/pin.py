"""A run keeps the settings of its first attempt, since they decide the bits of its result; leaving them is said aloud."""

import logging
from typing import Any

from configs.errors import ConfigError
from tasks.patch_environment.plan import resolve

log = logging.getLogger("infini_llama.environment")
# What decides the bits of a result, beside the seed and the data; and what is lost when it changes.
EXACT = {
    "device": "another device computes with other kernels",
    "nproc_per_node": "the same samples come in the same order, but gradients are summed in another order",
    "precision": "numbers are rounded differently",
    "attention_backend": "attention is computed by another function",
    "threads": "sums are split differently between the threads",
}
VERSIONS = ("torch", "numpy", "flash-attn")


def to_pin(config: dict, plan: dict, pinned: dict[str, Any]) -> dict[str, Any]:
    """The settings that later attempts are to follow: what the configuration asks for, else what was pinned, else the plan's.

    Where only this machine could not follow, the old pin stays: the run goes back to it on the machine that can.
    """
    explicit = {name: wish for name in EXACT if (wish := config["environment"][name]) != "auto"}
    return {name: plan[name] for name in EXACT} | pinned | explicit


def follow(config: dict, facts: dict, pinned: dict[str, Any]) -> dict[str, Any]:
    """A plan with the pinned settings wherever the configuration leaves them open and the machine can follow.

    Raises:
        ConfigError: the configuration itself asks for what this machine has not.
    """
    wishes = config["environment"]
    kept: dict[str, Any] = {}
    refusals: list[str] = []
    for name in EXACT:
        if wishes[name] != "auto":
            if name == "device" and wishes[name] != pinned[name]:
                break  # the other pinned settings were chosen for a device that is not wanted any more
            continue
        try:
            resolve(_asking(config, kept | {name: pinned[name]}), facts)
            kept[name] = pinned[name]
        except ConfigError as refused:
            refusals.append(" ".join(line.strip() for line in str(refused).splitlines()[1:]))
            if name == "device":
                break
    plan = resolve(_asking(config, kept), facts)
    for refusal in refusals:
        log.warning("this machine cannot follow the plan that the run began with: %s", refusal)
    return plan | {"reasons": plan["reasons"] | dict.fromkeys(kept, "pinned by an earlier attempt of this run")}


def _asking(config: dict, settings: dict[str, Any]) -> dict:
    return config | {"environment": config["environment"] | settings}


def say_what_changed(pinned: dict[str, Any], facts_then: dict, plan: dict, facts: dict) -> None:
    """Warns of every difference after which the result is no longer, or may no longer be, bitwise the same."""
    for name, loss in EXACT.items():
        if plan[name] != pinned[name]:
            log.warning(
                "%s was %s in this run so far and is %s now: the result is no longer bitwise the same (%s).",
                name,
                pinned[name],
                plan[name],
                loss,
            )
    for name, then, now in _hardware_and_versions(facts_then, facts):
        if then != now:
            log.warning(
                "%s was %s at the last attempt and is %s now: the result may no longer be bitwise the same.",
                name,
                then,
                now,
            )


def _hardware_and_versions(then: dict, now: dict) -> list[tuple[str, Any, Any]]:
    pairs = [
        ("python", then["python"], now["python"]),
        ("the processor", then["cpu"]["model"], now["cpu"]["model"]),
        ("the list of GPUs", [gpu["name"] for gpu in then["gpus"]], [gpu["name"] for gpu in now["gpus"]]),
    ]
    return pairs + [(name, then["versions"].get(name), now["versions"].get(name)) for name in VERSIONS]
