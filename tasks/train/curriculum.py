"""A run whose rows grow longer: which row table each of its samples is of, in samples instead of steps or shares."""

import logging

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import DataConfig, PipelineConfig
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.job import CurriculumStage

log = logging.getLogger("infini_llama.train")


def last_steps(data: DataConfig, max_steps: int) -> tuple[int, ...]:
    """The last step of each stage of data.curriculum, shares counted of `max_steps`."""
    return tuple(
        stage.until_step or max(1, round((stage.until_fraction or 0.0) * max_steps)) for stage in data.curriculum
    )


def refuse_stages(config: PipelineConfig) -> None:
    """Check data.curriculum against the sections train and model.

    Raises:
        ConfigError: rows may not repeat, but each stage begins the text anew; or rows are too short for the memory to be used.
    """
    stages, model = config.data.curriculum, config.model
    if stages and not config.train.repeat_data:
        raise ConfigError(
            "data.curriculum reads the text again for each sequence length, but train.repeat_data is false; set it "
            "to true, or use one length."
        )
    shortest = min((stage.sequence_length for stage in stages), default=None)
    if shortest and model.attention == "infini" and shortest <= model.segment_length:
        raise ConfigError(
            f"data.curriculum has sequences of {shortest} tokens, one segment of "
            f"model.segment_length={model.segment_length}, in which the memory is never read and its gates are not "
            "trained; use more than one segment in each stage."
        )


def in_samples(
    config: PipelineConfig, dataset: DatasetRef, ends: tuple[int, ...], max_steps: int
) -> tuple[CurriculumStage, ...]:
    """The stages of data.curriculum as the workers take them.

    Args:
        ends: the `last_steps` that the run began with: more steps later do not send it back to shorter rows.
    """
    found: list[CurriculumStage] = []
    for stage, table, steps in zip(config.data.curriculum, dataset.curriculum, ends, strict=True):
        found.append(CurriculumStage(chunks=table.chunks, until=steps * config.train.global_batch_size))
        log.info("sequences of %d tokens until step %d", stage.sequence_length, steps)
        if steps >= max_steps:
            log.warning(
                "data.curriculum: the stage of sequence_length=%d ends at step %d, but train.max_steps=%d; the run "
                "ends before the longer sequences",
                stage.sequence_length,
                steps,
                max_steps,
            )
    return tuple(found)
