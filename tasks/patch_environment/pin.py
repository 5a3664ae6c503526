"""A run keeps the settings of its first attempt, since they decide the bits of its result; leaving them is said aloud."""

import json
import logging
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.patch_environment.plan import resolve
from infini_llama.tasks.storage.artifacts import write_atomic

log = logging.getLogger("infini_llama.environment")
# What decides the bits of a result, beside the seed and the data; and what is lost when it changes.
EXACT = {
    "device": "another device computes with other kernels",
    "nproc_per_node": "the same samples come in the same order, but gradients are summed in another order",
    "nnodes": "the same samples come in the same order, but gradients are summed in another order",
    "precision": "numbers are rounded differently",
    "attention_backend": "attention is computed by another function",
    "compile": "compiled code rounds differently",
    "micro_batch_size": "gradients are summed over other parts of a batch",
    "loss_chunk": "the head's gradient is summed over other parts of a batch",
    "threads": "sums are split differently between the threads",
    "allocator": "kernels may take another path where tensors lie differently in memory",
}
SECTION = {
    "compile": "train",
    "micro_batch_size": "train",
    "loss_chunk": "train",
}  # of the configuration, where it is not environment
# What runs of older versions did, whose records do not say it.
BEFORE = {"compile": "off", "allocator": "system", "nnodes": 1}


def wish(config: dict, name: str) -> Any:
    """What the configuration asks for, or "auto"."""
    return config[SECTION.get(name, "environment")][name]


def asking(config: dict, settings: dict[str, Any]) -> dict:
    """The configuration with these settings of a plan asked for explicitly."""
    for name, value in settings.items():
        section = SECTION.get(name, "environment")
        config = config | {section: config[section] | {name: value}}
    return config


def to_pin(config: dict, plan: dict, pinned: dict[str, Any]) -> dict[str, Any]:
    """The settings that later attempts are to follow: what the configuration asks for, else what was pinned, else the plan's.

    Where only this machine could not follow, the old pin stays: the run goes back to it on the machine that can.
    """
    explicit = {name: value for name in EXACT if (value := wish(config, name)) != "auto"}
    return {name: plan[name] for name in EXACT} | pinned | explicit


def write(path: Path, plan: dict) -> dict:
    """Writes what the plan carries as its record to `path`, a run's environment.json; returns the plan without it.

    To be called by whoever holds the run's lock and knows that the run takes this configuration.
    """
    write_atomic(path, json.dumps(plan["record"], indent=1))
    return {name: value for name, value in plan.items() if name != "record"}


def complete(pinned: dict[str, Any], config: dict, plan: dict) -> dict[str, Any]:
    """A pin with the settings that an older version did not write down."""
    missing = {name: plan[name] for name in EXACT} | BEFORE
    return {name: pinned.get(name, missing[name]) for name in EXACT}


def follow(config: dict, facts: dict, pinned: dict[str, Any]) -> dict[str, Any]:
    """A plan with the pinned settings wherever the configuration leaves them open and the machine can follow.

    Raises:
        ConfigError: the configuration itself asks for what this machine has not.
    """
    kept: dict[str, Any] = {}
    refusals: list[str] = []
    for name in EXACT:
        if name not in pinned:
            continue
        if (asked := wish(config, name)) != "auto":
            if name == "device" and asked != pinned[name]:
                break  # the other pinned settings were chosen for a device that is not wanted any more
            continue
        try:
            resolve(asking(config, kept | {name: pinned[name]}), facts)
            kept[name] = pinned[name]
        except ConfigError as refused:
            refusals.append(" ".join(line.strip() for line in str(refused).splitlines()[1:]))
            if name == "device":
                break
    plan = resolve(asking(config, kept), facts)
    for refusal in refusals:
        log.warning("this machine cannot follow the plan that the run began with: %s", refusal)
    return plan | {"reasons": plan["reasons"] | dict.fromkeys(kept, "pinned by an earlier attempt of this run")}
