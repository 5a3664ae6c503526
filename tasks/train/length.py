"""How many steps a run has, where its configuration says it in epochs or tokens."""

import logging
import math
from pathlib import Path

import numpy as np

from infini_llama.configs.durations import count
from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.preprocess.tokens.reader import TokenReader

log = logging.getLogger("infini_llama.train")


def in_steps(train: dict, reference: dict, home: Path) -> dict:
    """The section `train` with `max_steps` alone: a function of the settings and the dataset.

    Raises:
        ConfigError: the warm-up would not end, or rows would be seen twice although `train.repeat_data` is off.
    """
    if train["max_steps"] is None:
        rows, batch = reference["train"]["rows"], train["global_batch_size"]
        if train["num_epochs"] is not None:
            steps, said = math.ceil(train["num_epochs"] * rows / batch), f"train.num_epochs={train['num_epochs']:g}"
        else:
            reader = TokenReader(home / reference["path"], reference["chunks"], "train")
            targets = reader.count_targets(np.arange(rows))
            steps = math.ceil(count(train["max_tokens"]) * rows / (batch * targets))
            said = f"train.max_tokens={train['max_tokens']}"
        log.info("%s is %d steps of %d sequences, of which the dataset has %d", said, steps, batch, rows)
        if train["warmup_steps"] >= steps:
            raise ConfigError(
                f"train.warmup_steps={train['warmup_steps']} must be fewer than the {steps} steps of {said}; lower it, or train longer."
            )
        train = train | {"max_steps": steps}
    refuse_repeats(train, reference["train"]["rows"])
    return train | {"num_epochs": None, "max_tokens": None}


def refuse_repeats(train: dict, rows: int) -> None:
    """Where `train.repeat_data` is off, refuses a run that may see one of the `rows` training rows twice.

    Raises:
        ConfigError: it is.
    """
    steps, batch = train["max_steps"], train["global_batch_size"]
    if not train["repeat_data"] and train["prefer_long_documents"]:
        raise ConfigError(
            f"train.prefer_long_documents={train['prefer_long_documents']:g} sees rows of long documents again before others have been "
            "seen, while train.repeat_data is off; switch it on, or set prefer_long_documents=0."
        )
    if not train["repeat_data"] and steps * batch > rows:
        raise ConfigError(
            f"train.max_steps={steps} of train.global_batch_size={batch} sequences are {steps * batch:,} rows, and the dataset has "
            f"{rows:,} while train.repeat_data is off; train at most {rows // batch} steps, or switch it on."
        )
