"""The plan of an attempt: the checkpoint that it starts from, and all that workers are given."""

import logging
import time
from pathlib import Path

from infini_llama.configs.durations import duration
from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.records.metrics import (
    MetricsLine,
    StartTime,
    TrainLine,
    ValidationLine,
)
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.goodput import goodput, seconds_after
from infini_llama.tasks.runs.run_folder import RunFolder, read_attempts, read_metrics
from infini_llama.tasks.storage.locks import this_machine
from infini_llama.tasks.train.stopping import longest_evaluation

log = logging.getLogger("infini_llama.train")


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
    resume = _resume_of(config, run, invocation)
    followed = _followed(resume, lineage)
    chosen = checkpoints.choose_and_abandon_newer(
        run.checkpoints, followed or resume, followed
    )
    state = None if chosen is None else checkpoints.read_state(chosen)
    from_step = 0 if state is None else state.step
    if chosen is not None and state is not None:
        _refuse_other_model(chosen, state, lineage)
        _refuse_other_dataset(run, chosen, state, lineage)
        _refuse_other_stage(run, chosen, state, config)
        _warn_of_differences(chosen, state, lineage, plan)
    if resume not in checkpoints.RULES and chosen is not None and followed is None:
        lineage = _following(lineage, resume, chosen)
    if chosen is not None and from_step >= lineage.max_steps:
        _refuse_foreign_end(run, chosen, from_step, lineage.max_steps)
        _warn_beyond_end(from_step, lineage.max_steps)
    # By steps and tokens, an interval follows from the train state.
    is_saved_by_time = duration(config.train.save_steps).unit == "seconds"
    now = time.time()
    lines = read_metrics(run)
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
        evaluation_time=longest_evaluation(lines),
        since_evaluation=since_evaluation(lines, from_step),
        # Lost attempts count: a run whose attempts all end before the interval is saved at last.
        since_save=seconds_after(run, from_step) if is_saved_by_time else 0.0,
    )


def _resume_of(config: PipelineConfig, run: RunFolder, invocation: str) -> str:
    """runtime.resume; a rule holds for the first attempt of a command."""
    resume = config.runtime.resume
    if resume in checkpoints.RULES and not is_first_of_command(run, invocation):
        return "auto"
    return resume


def _followed(resume: str, lineage: Lineage) -> str | None:
    """The checkpoint of a path in runtime.resume that the run follows already; None: it does not.

    `latest` may point to another one by now.
    """
    if resume != lineage.resumed_from:
        return None
    return lineage.resumed_checkpoint or resume  # an earlier version did not record it


def _following(lineage: Lineage, resume: str, chosen: Path) -> Lineage:
    """The lineage of a run that follows a path in runtime.resume, where `chosen` is.

    It does until it has saved a checkpoint of its own after that.
    """
    checkpoint = str(Path(resume).parent / chosen.name)
    return changed(lineage, resumed_from=resume, resumed_checkpoint=checkpoint)


def since_evaluation(lines: list[MetricsLine], step: int) -> float:
    """Seconds of training between the last evaluation and the checkpoint of `step`.

    Args:
        lines: of metrics.jsonl; those of later steps are of work that is lost.
    """
    kept = [line for line in lines if line.step <= step]
    last = max(
        (line.step for line in kept if isinstance(line, ValidationLine)), default=0
    )
    return sum(
        line.step_time + line.save_time + (line.report_time or 0.0)
        for line in kept
        if isinstance(line, TrainLine) and line.step > last
    )


def plan_next_attempt(
    before: AttemptPlan, lineage: Lineage | None = None
) -> AttemptPlan:
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


def is_first_of_command(run: RunFolder, invocation: str) -> bool:
    """Whether this command, or flow run, has made no attempt before, once all are recorded."""
    return invocation not in {record.invocation for record in read_attempts(run)}


def _refuse_other_model(chosen: Path, state: TrainState, lineage: Lineage) -> None:
    configured = lineage.model.to_dict()
    # An earlier version did not write keys that are newer.
    newer = {"memory_maps": False, "attend_previous_segment": False}
    recorded = newer | state.model if state.model else {}
    lines = [
        f"model.{key}: {value} there, {configured[key]} here"
        for key, value in recorded.items()
        if key in configured and value != configured[key]
    ]
    if lines:
        raise ConfigError(f"checkpoint {chosen} has another architecture", lines)


def _is_other_dataset(state: TrainState, lineage: Lineage) -> bool:
    return state.dataset not in (None, lineage.dataset.digest)


def _is_own(run: RunFolder, checkpoint: Path) -> bool:
    return checkpoint.parent.resolve() == run.checkpoints.resolve()


def _refuse_other_dataset(
    run: RunFolder, chosen: Path, state: TrainState, lineage: Lineage
) -> None:
    """Refuse a checkpoint of the run's folder that was trained on another dataset."""
    if _is_own(run, chosen) and _is_other_dataset(state, lineage):
        raise DataError(
            f"checkpoint {chosen} was trained on another dataset ({state.dataset}) "
            f"than this run ({lineage.dataset.digest}); move it out of the run's folder, "
            "or choose another runtime.name."
        )


def _refuse_other_stage(
    run: RunFolder, chosen: Path, state: TrainState, config: PipelineConfig
) -> None:
    """Refuse another run's checkpoint at a sample at which this run's curriculum has another step.

    The stages are named by steps, and follow from samples.
    """
    samples = state.step * config.train.global_batch_size
    is_foreign = not _is_own(run, chosen)
    if config.data.curriculum and is_foreign and state.samples != samples:
        raise ConfigError(
            f"runtime.resume={chosen} has consumed {state.samples:,} samples in {state.step:,} "
            f"steps, and with train.global_batch_size={config.train.global_batch_size} it would be "
            f"{samples:,}, so data.curriculum would end at another step. Its run had other global "
            "batches, or a rollback left samples out; use that run's train.global_batch_size, a "
            "checkpoint from before the rollback, or no curriculum."
        )


def _warn_of_differences(
    chosen: Path, state: TrainState, lineage: Lineage, plan: EnvironmentPlan
) -> None:
    """Warn of another run's dataset, and of another number of workers."""
    if _is_other_dataset(state, lineage):
        log.warning(
            "checkpoint %s was trained on another dataset (%s) than this run (%s); "
            "the run continues with its own dataset. Both need the same tokenizer.",
            chosen,
            state.dataset,
            lineage.dataset.digest,
        )
    if state.world_size != plan.world_size:
        log.warning(
            "the checkpoint was written by %d worker(s) and is resumed by %d: the samples and "
            "their order stay the same, but sums are rounded differently, "
            "so the run is no longer bitwise identical to an uninterrupted one.",
            state.world_size,
            plan.world_size,
        )


def _refuse_foreign_end(
    run: RunFolder, chosen: Path, step: int, max_steps: int
) -> None:
    """Refuse another run's checkpoint after which no step is trained.

    This run would have no checkpoint.
    """
    if chosen.parent.resolve() != run.checkpoints.resolve():
        raise ConfigError(
            f"runtime.resume={chosen} is at step {step}, and this run ends at step {max_steps}, "
            f"so there is nothing to train; set train.max_steps to more than {step}."
        )


def _warn_beyond_end(step: int, max_steps: int) -> None:
    """Warn that a run is finished with more steps than it should have."""
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
