"""A run whose rows grow longer: which row table each of its samples is of, in samples instead of steps or shares."""

import logging
from typing import Any

from infini_llama.configs.errors import ConfigError

log = logging.getLogger("infini_llama.train")


def last_steps(config: dict) -> list[int]:
    """The last step of each stage of data.curriculum, shares counted of train.max_steps, which must be resolved."""
    stages, steps = config["data"]["curriculum"], config["train"]["max_steps"]
    return [stage["until_step"] or max(1, round(stage["until_fraction"] * steps)) for stage in stages]


def refuse_stages(config: dict) -> None:
    """Raises ConfigError: rows may not repeat, but each stage begins the text anew; or rows are too short for the memory to be used."""
    stages, train, model = config["data"]["curriculum"], config["train"], config["model"]
    if stages and not train["repeat_data"]:
        raise ConfigError(
            "data.curriculum reads the text anew in rows of each length, while train.repeat_data is off; switch it on, or train on "
            "one length."
        )
    shortest = min((stage["sequence_length"] for stage in stages), default=None)
    if shortest and model["attention"] == "infini" and shortest <= model["segment_length"]:
        raise ConfigError(
            f"data.curriculum has rows of {shortest} tokens, one segment of model.segment_length={model['segment_length']}, in which the "
            "memory is never read and its gates learn nothing; give each stage more than one segment."
        )


def in_samples(config: dict, reference: dict, ends: list[int]) -> list[dict[str, Any]]:
    """The stages of data.curriculum as the workers take them: {"chunks", "until": the first sample that is not of the stage}.

    Args:
        config: with train.max_steps resolved.
        ends: the `last_steps` that the run began with: more steps later do not send it back to shorter rows.
    """
    stages, train, found = config["data"]["curriculum"], config["train"], []
    for stage, table, steps in zip(stages, reference.get("curriculum", []), ends, strict=True):
        found.append({"chunks": table["chunks"], "until": steps * train["global_batch_size"]})
        log.info("rows of %d tokens until step %d", stage["sequence_length"], steps)
        if steps >= train["max_steps"]:
            log.warning(
                "data.curriculum: the stage of sequence_length=%d ends at step %d, but train.max_steps=%d; the run ends before longer rows",
                stage["sequence_length"],
                steps,
                train["max_steps"],
            )
    return found
