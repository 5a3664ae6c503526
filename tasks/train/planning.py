"""The plan of a run and of its next attempt.

Both follow from the configuration, the dataset, the environment plan and the run's history.
"""

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise
from operator import mul
from pathlib import Path

import numpy as np

from infini_llama.configs.deepspeed import refuse_contradictions
from infini_llama.configs.durations import count
from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.reading import JsonObject, JsonValue, changed
from infini_llama.configs.schema import DataConfig, PipelineConfig, TrainingConfig
from infini_llama.configs.schema.section import Resume, resume_policies
from infini_llama.configs.secrets import without_secrets
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.lineage import Lineage, LineageCurriculumStage, LineageDataset
from infini_llama.tasks.records.metrics import StartTime
from infini_llama.tasks.records.plan import EnvironmentPlan, PinnedSettings
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.goodput import goodput
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    attempt_folders,
    number_of,
    read_attempt_plan,
    read_attempts,
)
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.locks import this_machine
from infini_llama.tasks.train.initial import initial_weights, refuse_unlike
from infini_llama.tasks.train.stopping import grace_period
from infini_llama.tasks.train.worker.data.order import WeightedSource, weighted_sources
from infini_llama.tasks.train.worker.strategies.schedule import factor

log = logging.getLogger("infini_llama.train")
ROWS_AT_ONCE = 4096  # rows whose targets are counted at a time
POLICIES = resume_policies(TrainingConfig)
# Keys that are not compared: the length is compared in steps, initial weights by their digest, and
# settings of the plan with the environment.
NOT_COMPARED = {"num_epochs", "max_tokens", "init_from", *PinnedSettings.model_fields}


def bind_run(config: PipelineConfig, dataset: DatasetRef, plan: EnvironmentPlan) -> Lineage:
    """Decide what the run `config.runtime.name` is, or refuse its folder.

    The decision is written into lineage.json and config.yaml.

    A finished run with nothing left to do keeps the settings of section `train` that it was trained
    with.

    Raises:
        ConfigError: the settings contradict each other, or the folder belongs to another dataset,
            architecture or start; it names every difference.
    """
    home = config.runtime.home.resolve()
    run = RunFolder.of(config.runtime)
    before = run.read_lineage()
    initial = initial_weights(config.train.init_from, before)
    vocabulary = (initial or dataset).vocab_size
    model = LlamaConfig(**config.model.architecture(vocabulary, dataset.sequence_length))
    _refuse_short_curriculum(config)
    bound = _bound_dataset(config, dataset)
    max_steps = _max_steps(config, dataset, bound.weights, before)
    refuse_contradictions(config.train, plan.micro_batch_size, plan.precision, plan.world_size)
    lineage = Lineage(
        dataset=bound,
        text=dataset.text,
        model=model,
        train=config.train,
        max_steps=max_steps,
        init_from=initial,
        # More steps later do not send a run back to shorter rows.
        curriculum_ends=before.curriculum_ends if before else _last_steps(config.data, max_steps),
        skipped_samples=before.skipped_samples if before else (),
        micro_batch_limit=before.micro_batch_limit if before else None,
        resumed_from=before.resumed_from if before else None,
    )
    if before:
        _refuse_other_run(run, before, lineage)
        if (before.train, before.max_steps) != (lineage.train, lineage.max_steps):
            is_taken_back = goes_back(config.runtime.resume, before)
            lineage = _with_changed_settings(run, before, lineage, is_taken_back)
    elif initial:
        refuse_unlike(initial, model, home / dataset.path)
    _warn_of_unused_curriculum(config.data, lineage)
    _warn_of_unused_profile(run, lineage)
    _warn_of_limit(plan, lineage)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    # Else the first save would find out.
    if not os.access(run.checkpoints, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{run.checkpoints} cannot be written by this user; make it yours (chown -R), "
            "or set runtime.home to a folder that you may write."
        )
    run.write(run.lineage, lineage)
    settings = without_secrets(config).model_dump(mode="json", exclude={"deployment"})
    run.write_config(settings | {"train": lineage.train.model_dump(mode="json")})
    return lineage


def plan_attempt(
    config: PipelineConfig,
    dataset: DatasetRef,
    plan: EnvironmentPlan,
    lineage: Lineage,
    invocation: str,
    verify_on_read: bool,
) -> AttemptPlan:
    """The next attempt of a run.

    Damaged checkpoints are moved aside, and those newer than a chosen one of the run to
    `abandoned/`.

    Args:
        lineage: of `bind_run`, or as the last attempt's end has changed it.

    Raises:
        ConfigError: runtime.resume names no checkpoint of this run.
        DataError: a checkpoint in the run's folder is of another dataset.
    """
    run = RunFolder.of(config.runtime)
    resume = config.runtime.resume
    if resume in checkpoints.RULES and not is_first_of_command(run, invocation):
        # The rule holds for the first attempt of a command.
        resume = "auto"
    chosen = checkpoints.choose_and_abandon_newer(run.checkpoints, resume, lineage.resumed_from)
    from_step = _refuse_unlike(run, chosen, lineage, plan) if chosen else 0
    # A path holds until the run has a checkpoint of its own since.
    if resume not in checkpoints.RULES:
        lineage = changed(lineage, resumed_from=resume)
    if chosen and from_step >= lineage.max_steps:
        _refuse_foreign_end(run, chosen, from_step, lineage.max_steps)
    now = time.time()
    return AttemptPlan(
        started=StartTime(wall=now, monotonic=time.monotonic(), machine=this_machine()),
        from_step=from_step,
        run_dir=run.path,
        config=config,
        dataset=dataset,
        plan=plan,
        lineage=lineage,
        verify_on_read=verify_on_read,
        invocation=invocation,
        resume_from=chosen,
        goodput=goodput(run, from_step, now),
        grace_period=grace_period(run, config.runtime),
    )


def plan_next_attempt(before: AttemptPlan, lineage: Lineage | None = None) -> AttemptPlan:
    """The attempt after `before`, from the newest valid checkpoint.

    Checkpoints are moved as by `plan_attempt`.

    Args:
        lineage: as the end of `before` has changed it; None: as it was.
    """
    return plan_attempt(
        before.config,
        before.dataset,
        before.plan,
        lineage or before.lineage,
        before.invocation,
        before.verify_on_read,
    )


def goes_back(resume: str, lineage: Lineage) -> bool:
    """Whether `runtime.resume` names a checkpoint that the run has not started from yet.

    Then also a finished run has steps left.
    """
    return resume not in checkpoints.RULES and resume != lineage.resumed_from


def is_first_of_command(run: RunFolder, invocation: str) -> bool:
    """Whether this command has made no attempt before.

    An attempt that was killed with its command, or flow run, has no record yet.
    """
    made = {record.attempt: record.invocation for record in read_attempts(run)}
    for folder in attempt_folders(run):
        if number_of(folder) not in made:
            with suppress(Damaged):
                made[number_of(folder)] = read_attempt_plan(folder).invocation
    return invocation not in made.values()


def _max_steps(
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
    if before and (before.train.max_tokens, before.train.global_batch_size) == (max_tokens, batch):
        # Counted anew, they could be others: the ends of its stages are rounded.
        return before.max_steps
    ends = before.curriculum_ends if before else [stage.until for stage in config.data.curriculum]
    targets = _targets_per_step(config, dataset, weights)
    if not targets[-1]:
        raise ConfigError(
            f"{setting} counts tokens with a target, and no train sequence of the dataset "
            "has one; lengthen data.sequence_length, or shorten the prompts."
        )
    exact_ends = [Fraction(repr(end)) for end in ends]
    return _steps_to_targets(count(max_tokens), targets, exact_ends)


def _steps_to_targets(number: int, targets: Sequence[Fraction], ends: Sequence[Fraction]) -> int:
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
    for table in (*(stage.row_table for stage in dataset.curriculum), dataset.row_table):
        reader = TokenReader(folder, table, "train", verify_on_read=True)
        rows = config.train.global_batch_size * (dataset.sequence_length // reader.sequence_length)
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


def _refuse_short_curriculum(config: PipelineConfig) -> None:
    """Check data.curriculum against the sections train and model.

    Raises:
        ConfigError: rows are too short for the memory to be used.
    """
    model = config.model
    shortest = min((stage.sequence_length for stage in config.data.curriculum), default=None)
    if shortest and model.attention == "infini" and shortest <= model.segment_length:
        raise ConfigError(
            f"data.curriculum has sequences of {shortest} tokens, one segment of "
            f"model.segment_length={model.segment_length}, in which the memory is never read "
            "and its gates are not trained; use more than one segment in each stage."
        )


def _last_steps(data: DataConfig, max_steps: int) -> tuple[int, ...]:
    """The last step of each stage of data.curriculum, fractions counted of `max_steps`."""
    ends = [stage.until for stage in data.curriculum]
    return tuple(end if isinstance(end, int) else max(1, round(end * max_steps)) for end in ends)


def _warn_of_unused_curriculum(data: DataConfig, lineage: Lineage) -> None:
    for stage, last_step in zip(data.curriculum, lineage.curriculum_ends, strict=True):
        log.info("sequences of %d tokens until step %d", stage.sequence_length, last_step)
        if last_step >= lineage.max_steps:
            log.warning(
                "data.curriculum: the stage of sequence_length=%d ends at step %d, "
                "but train.max_steps=%d; the run ends before the longer sequences",
                stage.sequence_length,
                last_step,
                lineage.max_steps,
            )


def _warn_of_unused_profile(run: RunFolder, lineage: Lineage) -> None:
    span = lineage.train.profile_steps
    if not span:
        return
    step = checkpoints.latest_step(run.checkpoints)
    first, last = span
    if first > lineage.max_steps or (last <= step and not run.profile.exists()):
        log.warning(
            "train.profile_steps=%s: nothing is recorded, since the run continues with step %d "
            "and ends with step %d",
            span,
            step + 1,
            lineage.max_steps,
        )


def _warn_of_limit(plan: EnvironmentPlan, lineage: Lineage) -> None:
    limit = lineage.micro_batch_limit
    if limit and plan.micro_batch_size > limit:
        log.warning(
            "train.micro_batch_size=%d is limited to %d: an attempt of this run ran out of memory "
            "with larger micro-batches (micro_batch_limit in lineage.json); "
            "a new runtime.name has no limit",
            plan.micro_batch_size,
            limit,
        )


def _bound_dataset(config: PipelineConfig, dataset: DatasetRef) -> LineageDataset:
    stages = tuple(
        LineageCurriculumStage(
            **stage.model_dump(mode="json"), row_table_digest=table.row_table_digest
        )
        for stage, table in zip(config.data.curriculum, dataset.curriculum, strict=True)
    )
    weights = {source.name: source.weight for source in config.data.sources if source.weight}
    return LineageDataset(
        path=dataset.path,
        digest=dataset.digest,
        row_table=dataset.row_table,
        row_table_digest=dataset.row_table_digest,
        sequence_length=dataset.sequence_length,
        weights=weights or None,
        curriculum=stages or None,
    )


def _refuse_other_run(run: RunFolder, before: Lineage, now: Lineage) -> None:
    settings = _changed_settings(before, now)
    refused = [
        *_differences(before.dataset.to_json(), now.dataset.to_json(), "dataset").values(),
        *_differences(before.model.to_dict(), now.model.to_dict(), "model").values(),
        *(line for name, line in settings.items() if POLICIES[name] is Resume.FIXED),
    ]
    started, starts = (
        start.digest if start else "no weights" for start in (before.init_from, now.init_from)
    )
    if started != starts:
        refused.append(f"train.init_from: {started} before, {starts} now")
    if refused:
        raise ConfigError(
            f"run folder {run.path} belongs to another run; "
            "choose another runtime.name. Differences",
            refused,
        )


def _with_changed_settings(
    run: RunFolder, before: Lineage, now: Lineage, is_taken_back: bool
) -> Lineage:
    """The lineage of a run whose settings have changed.

    Returns:
        `now`, with a warning of what makes the run another one than began; `before` if the run has
        finished, and no step follows.
    """
    settings = _changed_settings(before, now)
    result = RunReader(run.path).result
    patience = now.train.early_stopping_patience
    if not is_taken_back and result is not None and result.is_final(now.max_steps, patience):
        if settings:
            lines = "; ".join(settings.values())
            log.warning(
                "run %s has already finished at step %d; changed settings are not used: %s",
                run.path.name,
                result.steps,
                lines,
            )
        return before
    for name, line in settings.items():
        if POLICIES[name] is not Resume.FREE:
            log.warning(
                "%s: from here on, the run is no longer bitwise identical to an uninterrupted one.",
                line,
            )
    _warn_of_learning_rate(before, now, checkpoints.latest_step(run.checkpoints))
    return now


def _warn_of_learning_rate(before: Lineage, now: Lineage, step: int) -> None:
    """Warn if the learning rate of the next step changes with the settings.

    More steps move a run back to an earlier part of its schedule: the rate rises.
    """
    old, new = (
        start.train.learning_rate * factor(start.train, start.max_steps, step)
        for start in (before, now)
    )
    if 0 < step < now.max_steps and old != new:
        log.warning(
            "the learning rate of step %d is %.3g; with the settings before, it would be %.3g",
            step + 1,
            new,
            old,
        )


def _changed_settings(before: Lineage, now: Lineage) -> dict[str, str]:
    """A sentence for each setting of section `train` that has another value now, by its name."""
    return _differences(_compared(before), _compared(now), "train")


def _compared(lineage: Lineage) -> JsonObject:
    settings = lineage.train.model_dump(mode="json") | {"max_steps": lineage.max_steps}
    return {name: value for name, value in settings.items() if name not in NOT_COMPARED}


def _differences(
    before: Mapping[str, JsonValue], now: Mapping[str, JsonValue], section: str
) -> dict[str, str]:
    """A sentence for each setting that has another value now, by its name."""
    return {
        key: f"{section}.{key}: {before[key]} before, {now[key]} now"
        for key in before
        if before[key] != now[key]
    }


def _refuse_foreign_end(run: RunFolder, chosen: Path, step: int, max_steps: int) -> None:
    """Check a checkpoint after which no step is trained.

    A run that is beyond its end is finished with the steps that it has.

    Raises:
        ConfigError: it is another run's, so that this one would have no checkpoint.
    """
    if chosen.parent.resolve() != run.checkpoints.resolve():
        raise ConfigError(
            f"runtime.resume={chosen} is at step {step}, and this run ends at step {max_steps}, "
            f"so there is nothing to train; set train.max_steps to more than {step}."
        )
    if step > max_steps:
        log.warning(
            "the run is at step %d already, beyond its end at step %d: no step is trained, "
            "and it is finished with the weights of step %d. To train to step %d, "
            "choose another runtime.name, or set runtime.resume to an older checkpoint.",
            step,
            max_steps,
            step,
            max_steps,
        )


def _refuse_unlike(run: RunFolder, chosen: Path, lineage: Lineage, plan: EnvironmentPlan) -> int:
    """Check that a checkpoint is of this architecture, and one of the run's folder of its dataset.

    Returns:
        the step of the checkpoint.
    """
    state = checkpoints.read_state(chosen)
    saved = state.model
    configured = lineage.model.to_dict()
    differing = [key for key in saved if key in configured and saved[key] != configured[key]]
    if differing:
        lines = [f"model.{key}: {saved[key]} there, {configured[key]} here" for key in differing]
        raise ConfigError(f"checkpoint {chosen} has another architecture", lines)
    if state.dataset not in (None, lineage.dataset.digest):
        fault = (
            f"checkpoint {chosen} was trained on another dataset ({state.dataset}) "
            f"than this run ({lineage.dataset.digest})"
        )
        if chosen.parent.resolve() == run.checkpoints.resolve():
            raise DataError(
                f"{fault}; move it out of the run's folder, or choose another runtime.name."
            )
        log.warning(
            "%s; the run continues with its own dataset. Both need the same tokenizer.", fault
        )
    if state.world_size != plan.world_size:
        log.warning(
            "the checkpoint was written by %d worker(s) and is resumed by %d: the samples and "
            "their order stay the same, but sums are rounded differently, "
            "so the run is no longer bitwise identical to an uninterrupted one.",
            state.world_size,
            plan.world_size,
        )
    return state.step
