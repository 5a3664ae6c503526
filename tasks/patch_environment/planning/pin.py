"""A run keeps the settings of its first attempt, since they determine the bits of its result."""

import logging
from collections.abc import Mapping

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.planning.plan import resolve
from infini_llama.tasks.records.environment import PinnedSettings
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan

log = logging.getLogger("infini_llama.environment")
# The fields of `PinnedSettings`, and how a result changes with each.
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
TRAIN_SETTINGS = (
    "compile",
    "micro_batch_size",
    "loss_chunk",
)  # the others are of the section environment


def requested(config: PipelineConfig, name: str) -> str | int:
    """What the configuration sets, or "auto"."""
    return getattr(config.train if name in TRAIN_SETTINGS else config.environment, name)


def with_settings(config: PipelineConfig, settings: Mapping[str, str | int]) -> PipelineConfig:
    """The configuration with these settings of a plan set explicitly."""
    train = {name: value for name, value in settings.items() if name in TRAIN_SETTINGS}
    environment = {name: value for name, value in settings.items() if name not in TRAIN_SETTINGS}
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "environment": config.environment.model_copy(update=environment),
        }
    )


def settings_of(plan: EnvironmentPlan) -> PinnedSettings:
    """The settings of a plan that a run pins."""
    return PinnedSettings.from_json(plan.to_json())


def with_explicit(config: PipelineConfig, pinned: PinnedSettings) -> PinnedSettings:
    """The settings that later attempts follow: what the configuration sets, else what is pinned.

    If only this machine could not follow a pinned setting, it stays pinned: the run returns to it on the machine that can.
    """
    explicit = {name: value for name in EXACT if (value := requested(config, name)) != "auto"}
    return pinned.model_copy(update=explicit)


def follow(config: PipelineConfig, facts: MachineFacts, pinned: PinnedSettings) -> EnvironmentPlan:
    """A plan with the pinned settings wherever the configuration leaves them open and the machine supports them.

    Raises:
        ConfigError: the configuration itself sets what this machine cannot run.
    """
    kept: dict[str, str | int] = {}
    refusals: list[str] = []
    for name in EXACT:
        setting = getattr(pinned, name)
        if (explicit := requested(config, name)) != "auto":
            if name == "device" and explicit != setting:
                break  # the other pinned settings were chosen for the other device
            continue
        try:
            resolve(with_settings(config, kept | {name: setting}), facts)
            kept[name] = setting
        except ConfigError as refused:
            refusals.append(" ".join(line.strip() for line in str(refused).splitlines()[1:]))
            if name == "device":
                break
    plan = resolve(with_settings(config, kept), facts)
    for refusal in refusals:
        log.warning("this machine cannot use the run's original plan: %s", refusal)
    reasons = plan.reasons | dict.fromkeys(kept, "pinned by an earlier attempt of this run")
    return plan.model_copy(update={"reasons": reasons})
