"""How many steps a run has, where its configuration says it in epochs or tokens."""

import logging
import math
from pathlib import Path

import numpy as np

from infini_llama.configs.durations import count
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import TrainingConfig
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.records.dataset import DatasetRef

log = logging.getLogger("infini_llama.train")


def resolve_max_steps(train: TrainingConfig, dataset: DatasetRef, home: Path) -> int:
    """Steps of the run: a function of the settings and the dataset.

    Raises:
        ConfigError: the warm-up would not end, or rows would be seen twice although `train.repeat_data` is off.
    """
    rows, batch, steps = dataset.train.rows, train.global_batch_size, train.max_steps
    if steps is None:
        if train.num_epochs is not None:
            steps, setting = math.ceil(train.num_epochs * rows / batch), f"train.num_epochs={train.num_epochs:g}"
        else:
            assert train.max_tokens is not None  # one of the three is set
            reader = TokenReader(home / dataset.path, dataset.chunks, "train", verify_on_read=True)
            targets = reader.count_targets(np.arange(rows))
            steps = math.ceil(count(train.max_tokens) * rows / (batch * targets))
            setting = f"train.max_tokens={train.max_tokens}"
        log.info("%s: %d steps of %d sequences; the dataset has %d sequences", setting, steps, batch, rows)
        if train.warmup_steps >= steps:
            raise ConfigError(
                f"train.warmup_steps={train.warmup_steps} must be fewer than the {steps} steps of {setting}; lower it, or train longer."
            )
    refuse_repeats(train, steps, rows)
    return steps


def refuse_repeats(train: TrainingConfig, steps: int, rows: int) -> None:
    """Where `train.repeat_data` is off, refuse a run that may see one of the `rows` training rows twice.

    Raises:
        ConfigError: it may.
    """
    batch = train.global_batch_size
    if not train.repeat_data and train.prefer_long_documents:
        raise ConfigError(
            f"train.prefer_long_documents={train.prefer_long_documents:g} repeats sequences of long documents before "
            "others are used, but train.repeat_data is false; set it to true, or set prefer_long_documents=0."
        )
    if not train.repeat_data and steps * batch > rows:
        raise ConfigError(
            f"train.max_steps={steps} of train.global_batch_size={batch} sequences need {steps * batch:,} sequences, "
            f"but the dataset has {rows:,} and train.repeat_data is false; train at most {rows // batch} steps, or "
            "set it to true."
        )
