"""The length of a run in steps, from its settings, its dataset and data.curriculum."""

import logging
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from operator import mul

import numpy as np

from infini_llama.configs.durations import count
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.preprocess.tokens.order import WeightedSource, weighted_sources
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.lineage import Lineage

log = logging.getLogger("infini_llama.train")
ROWS_AT_ONCE = 4096  # rows whose targets are counted at a time


def steps_of(
    config: PipelineConfig,
    dataset: DatasetRef,
    weights: dict[str, float] | None,
    before: Lineage | None,
) -> int:
    """Steps of the run.

    They follow from the settings and the dataset, and from the steps at which the stages of a run
    that has begun end.

    Raises:
        ConfigError: the warm-up would not end, or the length is in tokens and no row has a target.
    """
    train = config.train
    if train.max_steps is not None:
        return train.max_steps
    rows = dataset.train.rows
    batch = train.global_batch_size
    if train.num_epochs is not None:
        setting = f"train.num_epochs={train.num_epochs:g}"
        # Exactly: 1.1 x 100 is 110.
        steps = math.ceil(Fraction(repr(train.num_epochs)) * rows / batch)
    else:
        setting = f"train.max_tokens={train.max_tokens}"
        steps = _steps_of_tokens(config, dataset, weights, before, setting)
    log.info(
        "%s: %d steps of %d sequences; the dataset has %d sequences",
        setting,
        steps,
        batch,
        rows,
    )
    if train.warmup_steps >= steps:
        raise ConfigError(
            f"train.warmup_steps={train.warmup_steps} must be fewer than "
            f"the {steps} steps of {setting}; lower it, or train longer."
        )
    return steps


def _steps_of_tokens(
    config: PipelineConfig,
    dataset: DatasetRef,
    weights: dict[str, float] | None,
    before: Lineage | None,
    setting: str,
) -> int:
    """Steps of a run whose length is `train.max_tokens`.

    Args:
        setting: the key and its value, for messages.
    """
    max_tokens = config.train.max_tokens
    batch = config.train.global_batch_size
    # One of the three lengths is set.
    assert max_tokens is not None
    if before and (before.train.max_tokens, before.train.global_batch_size) == (
        max_tokens,
        batch,
    ):
        # Counted anew, they could be others: the ends of its stages are rounded.
        return before.max_steps
    ends = (
        before.curriculum_ends
        if before
        else [stage.until for stage in config.data.curriculum]
    )
    targets = _targets_per_step(config, dataset, weights)
    if not targets[-1]:
        raise ConfigError(
            f"{setting} counts tokens with a target, and no train sequence of the dataset "
            "has one; lengthen data.sequence_length, or shorten the prompts."
        )
    exact_ends = [Fraction(repr(end)) for end in ends]
    return _steps_to_targets(count(max_tokens), targets, exact_ends)


def _steps_to_targets(
    number: int, targets: Sequence[Fraction], ends: Sequence[Fraction]
) -> int:
    """Steps until `number` targets.

    Args:
        targets: of a step in each stage of data.curriculum, and after them.
        ends: last step of each stage, or below 1 its fraction of all steps.
    """
    if ends and ends[0] < 1:
        shares = (end - start for start, end in pairwise((0, *ends, 1)))
        average = sum(map(mul, shares, targets), Fraction())
        return math.ceil(Fraction(number) / average)
    steps = Fraction()
    left = Fraction(number)
    for end, per_step in zip(ends, targets, strict=False):
        in_stage = (end - steps) * per_step
        if left <= in_stage:
            return math.ceil(steps + left / per_step)
        left -= in_stage
        steps = end
    return math.ceil(steps + left / targets[-1])


def _targets_per_step(
    config: PipelineConfig, dataset: DatasetRef, weights: dict[str, float] | None
) -> list[Fraction]:
    """Targets of a step, on average, in each stage of data.curriculum, and after them."""
    targets: list[Fraction] = []
    folder = config.runtime.home.resolve() / dataset.path
    for table in (
        *(stage.row_table for stage in dataset.curriculum),
        dataset.row_table,
    ):
        reader = TokenReader(folder, table, "train", verify_on_read=True)
        rows = config.train.global_batch_size * (
            dataset.sequence_length // reader.sequence_length
        )
        targets.append(rows * _targets_of_row(reader, weights))
    return targets


def _targets_of_row(reader: TokenReader, weights: dict[str, float] | None) -> Fraction:
    """Targets of a sequence, on average: of all rows, or of each source's in its weighted share."""
    everything = (WeightedSource("", 0, len(reader), 1),)
    sources = weighted_sources(reader.sources, weights) if weights else everything
    targets = Fraction(0)
    for source in sources:
        rows = np.arange(source.first, source.first + source.rows)
        # The masks of all rows at once may not fit into memory.
        parts = np.array_split(rows, -(-len(rows) // ROWS_AT_ONCE))
        counted = sum(map(reader.count_targets, parts))
        targets += Fraction(counted * source.weight, source.rows)
    return targets / sum(source.weight for source in sources)
