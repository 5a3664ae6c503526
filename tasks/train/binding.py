"""Binding of a run to its settings and dataset: all checks, then one write."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from infini_llama.configs.deepspeed import refuse_contradictions
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.reading import JsonObject, JsonValue
from infini_llama.configs.schedules import learning_rate_factor
from infini_llama.configs.schema import DataConfig, PipelineConfig, TrainingConfig
from infini_llama.configs.schema.section import Resume, resume_policies
from infini_llama.configs.schema.sources import SourceConfig
from infini_llama.configs.secrets import without_secrets
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.preprocess.tokens.order import in_order
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.lineage import (
    Lineage,
    LineageCurriculumStage,
    LineageDataset,
)
from infini_llama.tasks.records.plan import EnvironmentPlan, PinnedSettings
from infini_llama.tasks.records.summary import TrainingResult
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.storage.artifacts import ROW_TABLES, read_row_table
from infini_llama.tasks.train.initial import initial_weights, refuse_unlike
from infini_llama.tasks.train.length import steps_of

log = logging.getLogger("infini_llama.train")
POLICIES = resume_policies(TrainingConfig)
LOSS_WEIGHT = resume_policies(SourceConfig)["loss_weight"]
# Keys that are not compared: the length is compared in steps, initial weights by their digest, and
# settings of the plan with the environment.
NOT_COMPARED = {"num_epochs", "max_tokens", "init_from", *PinnedSettings.model_fields}


@dataclass(frozen=True)
class Binding:
    """A run as it was before, and as the command has it now.

    Attributes:
        before: None: the run is new.
    """

    config: PipelineConfig
    dataset: DatasetRef
    plan: EnvironmentPlan
    before: Lineage | None
    now: Lineage

    @property
    def run(self) -> RunFolder:
        return RunFolder.of(self.config.runtime)

    @cached_property
    def final_result(self) -> TrainingResult | None:
        """The result of a run that has finished and has nothing left to do; None of another."""
        resume = self.config.runtime.resume
        if self.before is None or goes_back(resume, self.before):
            return None
        result = RunReader(self.run.path).result
        patience = self.now.train.early_stopping_patience
        if result is None or not result.is_final(self.now.max_steps, patience):
            return None
        return result

    @property
    def finished_at(self) -> int | None:
        """The last step of such a run."""
        return None if self.final_result is None else self.final_result.steps

    def changed_settings(self, policy: Resume) -> list[str]:
        """A sentence for each setting of this policy that has changed.

        It is of section `train`, or the loss_weight of the sources.
        """
        if self.before is None:
            return []
        lines = _differences(_compared(self.before), _compared(self.now), "train")
        changed = [line for name, line in lines.items() if self._policy(name) is policy]
        before = self.before.loss_weights
        now = self.now.loss_weights
        if before != now and LOSS_WEIGHT is policy:
            changed.append(f"data.sources.loss_weight: {before} before, {now} now")
        return changed

    def _policy(self, name: str) -> Resume:
        """The policy of a key of section `train`.

        Early stopping counts evaluations, so that their number decides the last step.
        """
        if name == "eval_steps" and self.now.train.early_stopping_patience is not None:
            return Resume.INEXACT
        return POLICIES[name]


def bind_run(
    config: PipelineConfig, dataset: DatasetRef, plan: EnvironmentPlan
) -> Lineage:
    """Decide what the run `config.runtime.name` is, or refuse its folder.

    The decision is written into lineage.json and config.yaml. A finished run with nothing left to
    do keeps the lineage that it was trained with.

    Raises:
        ConfigError: complaints of `CHECKS`, all of them; or the initial weights or the length
            cannot be used.
    """
    before = RunFolder.of(config.runtime).read_lineage()
    binding = Binding(
        config, dataset, plan, before, _lineage_of(config, dataset, before)
    )
    refused: list[ConfigError] = []
    for check in CHECKS:
        try:
            check(binding)
        except ConfigError as complaint:
            refused.append(complaint)
    if len(refused) == 1:
        raise refused[0]
    if refused:
        name = config.runtime.name
        raise ConfigError(
            f"run {name} cannot be trained like this", list(map(str, refused))
        )
    _log_what_follows(binding)
    lineage = binding.now if before is None or binding.finished_at is None else before
    _write(binding.run, config, lineage)
    return lineage


def goes_back(resume: str, lineage: Lineage) -> bool:
    """Whether `runtime.resume` names a checkpoint that the run has not started from yet.

    Then also a finished run has steps left.
    """
    return resume not in checkpoints.RULES and resume != lineage.resumed_from


def _lineage_of(
    config: PipelineConfig, dataset: DatasetRef, before: Lineage | None
) -> Lineage:
    """The lineage of a run with these settings, which keeps what training has changed."""
    initial = initial_weights(config.train.init_from, before)
    vocabulary = (initial or dataset).vocab_size
    bound = _bound_dataset(config, dataset)
    max_steps = steps_of(config, dataset, bound.weights, before)
    return Lineage(
        dataset=bound,
        text=dataset.text,
        model=LlamaConfig(
            **config.model.architecture(vocabulary, dataset.sequence_length)
        ),
        train=config.train,
        max_steps=max_steps,
        init_from=initial,
        loss_weights=_loss_weights(config.data),
        # More steps later do not send a run back to shorter rows.
        curriculum_ends=before.curriculum_ends
        if before
        else _last_steps(config.data, max_steps),
        skipped_samples=before.skipped_samples if before else (),
        micro_batch_limit=before.micro_batch_limit if before else None,
        resumed_from=before.resumed_from if before else None,
        resumed_checkpoint=before.resumed_checkpoint if before else None,
    )


def _bound_dataset(config: PipelineConfig, dataset: DatasetRef) -> LineageDataset:
    stages = tuple(
        LineageCurriculumStage(
            **stage.model_dump(mode="json"), row_table_digest=table.row_table_digest
        )
        for stage, table in zip(config.data.curriculum, dataset.curriculum, strict=True)
    )
    weights = {
        source.name: source.weight for source in config.data.sources if source.weight
    }
    return LineageDataset(
        path=dataset.path,
        digest=dataset.digest,
        row_table=dataset.row_table,
        row_table_digest=dataset.row_table_digest,
        sequence_length=dataset.sequence_length,
        weights=weights or None,
        curriculum=stages or None,
    )


def _loss_weights(data: DataConfig) -> dict[str, float] | None:
    weights = {source.name: source.loss_weight for source in data.sources}
    return weights if len(set(weights.values())) > 1 else None


def refuse_other_run(binding: Binding) -> None:
    """Refuse a folder with another dataset, architecture, start, or settings that a run keeps."""
    before = binding.before
    now = binding.now
    if before is None:
        return
    differences = [
        *_differences(
            before.dataset.to_json(), now.dataset.to_json(), "dataset"
        ).values(),
        *_differences(before.model.to_dict(), now.model.to_dict(), "model").values(),
        *binding.changed_settings(Resume.FIXED),
    ]
    started = before.init_from.digest if before.init_from else "no weights"
    starts = now.init_from.digest if now.init_from else "no weights"
    if started != starts:
        differences.append(f"train.init_from: {started} before, {starts} now")
    if differences:
        raise ConfigError(
            f"run folder {binding.run.path} belongs to another run; "
            "choose another runtime.name. Differences",
            differences,
        )


def refuse_unused_settings(binding: Binding) -> None:
    """Refuse other settings of a run that has nothing left to do."""
    step = binding.finished_at
    changed = binding.changed_settings(Resume.INEXACT)
    if step is None or not changed:
        return
    if binding.final_result and binding.final_result.stopped_early is not None:
        raise ConfigError(
            f"run {binding.run.path.name} was ended at step {step} by "
            "train.early_stopping_patience; set that to a larger number, or to null, to train on. "
            "Differences",
            changed,
        )
    advice = "set runtime.resume to one of its checkpoints"
    if binding.config.runtime.resume not in checkpoints.RULES:
        advice = (
            "set runtime.resume to another checkpoint: "
            "it has started from this one already"
        )
    raise ConfigError(
        f"run {binding.run.path.name} has finished at step {step} with other settings; use "
        f"those, choose another runtime.name, or {advice}. Differences",
        changed,
    )


def refuse_short_curriculum(binding: Binding) -> None:
    """Refuse rows of data.curriculum that are too short for the memory to be used."""
    model = binding.config.model
    lengths = [stage.sequence_length for stage in binding.config.data.curriculum]
    unread = model.unread_tokens
    if model.attention == "infini" and lengths and min(lengths) <= unread:
        raise ConfigError(
            f"data.curriculum has sequences of {min(lengths)} tokens. The memory is never read by "
            f"the first {unread} tokens with model.segment_length={model.segment_length}, so its "
            "gates are not trained; use longer sequences in each stage."
        )


def refuse_deepspeed_contradictions(binding: Binding) -> None:
    """Refuse a JSON of DeepSpeed that contradicts the run's own keys or plan."""
    plan = binding.plan
    refuse_contradictions(
        binding.config.train, plan.micro_batch_size, plan.precision, plan.world_size
    )


def refuse_other_weights(binding: Binding) -> None:
    """Refuse a new run's first weights if they have another architecture, or other tokens."""
    initial = binding.now.init_from
    if binding.before is None and initial is not None:
        home = binding.config.runtime.home.resolve()
        refuse_unlike(initial, binding.now.model, home / binding.dataset.path)


def refuse_other_sources(binding: Binding) -> None:
    """Refuse weights of sources that the dataset does not have."""
    weights = binding.now.dataset.weights or binding.now.loss_weights
    if weights is None:
        return
    dataset = binding.dataset
    folder = binding.config.runtime.home.resolve() / dataset.path
    table = read_row_table(folder / ROW_TABLES / dataset.row_table)
    sources = table.content.sources
    in_order(sources.train if sources else (), weights)


def refuse_unwritable_folder(binding: Binding) -> None:
    """Refuse a folder of checkpoints that this user cannot write, before its first save does."""
    folder = binding.run.checkpoints
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{folder} cannot be written by this user; make it yours (chown -R), "
            "or set runtime.home to a folder that you may write."
        )


CHECKS = (
    refuse_other_run,
    refuse_unused_settings,
    refuse_short_curriculum,
    refuse_deepspeed_contradictions,
    refuse_other_weights,
    refuse_other_sources,
    refuse_unwritable_folder,
)


def _log_what_follows(binding: Binding) -> None:
    """Log what the settings change of a run that goes on, and what of them is not used."""
    _warn_of_unused_curriculum(binding.config.data, binding.now)
    _warn_of_unused_profile(binding.run, binding.now)
    _warn_of_limit(binding.plan, binding.now)
    if binding.before is None or binding.finished_at is not None:
        return
    for line in binding.changed_settings(Resume.INEXACT):
        log.warning(
            "%s: from here on, the run is no longer bitwise identical to an uninterrupted one.",
            line,
        )
    step = checkpoints.latest_step(binding.run.checkpoints)
    _warn_of_learning_rate(binding.before, binding.now, step)


def _write(run: RunFolder, config: PipelineConfig, lineage: Lineage) -> None:
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    run.write(run.lineage, lineage)
    settings = without_secrets(config).model_dump(mode="json", exclude={"deployment"})
    run.write_config(settings | {"train": lineage.train.model_dump(mode="json")})


def _last_steps(data: DataConfig, max_steps: int) -> tuple[int, ...]:
    """The last step of each stage of data.curriculum, fractions counted of `max_steps`."""
    ends = [stage.until for stage in data.curriculum]
    return tuple(
        end if isinstance(end, int) else max(1, round(end * max_steps)) for end in ends
    )


def _warn_of_unused_curriculum(data: DataConfig, lineage: Lineage) -> None:
    for stage, last_step in zip(data.curriculum, lineage.curriculum_ends, strict=True):
        log.info(
            "sequences of %d tokens until step %d", stage.sequence_length, last_step
        )
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


def _warn_of_learning_rate(before: Lineage, now: Lineage, step: int) -> None:
    """Warn if the learning rate of the next step changes with the settings.

    More steps move a run back to an earlier part of its schedule: the rate rises.
    """
    old, new = (
        start.train.learning_rate
        * learning_rate_factor(start.train, start.max_steps, step)
        for start in (before, now)
    )
    if 0 < step < now.max_steps and old != new:
        log.warning(
            "the learning rate of step %d is %.3g; with the settings before, it would be %.3g",
            step + 1,
            new,
            old,
        )


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
