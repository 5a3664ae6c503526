"""The training stage: takes the run's folder and makes attempts until the run is finished or a person has to act."""

import logging
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager

from infini_llama.configs.errors import ConfigError, DataError, ExitCode, TrainFailed, disk_full_as
from infini_llama.configs.reading import JsonObject
from infini_llama.configs.schema import PipelineConfig, RuntimeConfig, TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.environment import PatchedEnvironment
from infini_llama.tasks.records.lineage import Lineage
from infini_llama.tasks.records.metrics import ValidationLine
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.summary import RunPaths, RunSummary, TrainingResult
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.outcome import Outcome
from infini_llama.tasks.runs.record import RunRecord
from infini_llama.tasks.runs.run_folder import RunFolder, attempts
from infini_llama.tasks.storage.artifacts import Damaged, Lock
from infini_llama.tasks.storage.lease import Lease
from infini_llama.tasks.storage.record_file import as_record
from infini_llama.tasks.train.adapt import halve_micro_batch, roll_back
from infini_llama.tasks.train.attempt import attempt
from infini_llama.tasks.train.curriculum import in_samples, refuse_stages
from infini_llama.tasks.train.gpu_locks import gpus_of, locked
from infini_llama.tasks.train.grace import grace_period
from infini_llama.tasks.train.initial import initial_weights
from infini_llama.tasks.train.length import resolve_max_steps
from infini_llama.tasks.train.lineage import claim, resolved_settings
from infini_llama.tasks.train.prepare import is_retry
from infini_llama.tasks.train.run_context import RunContext

log = logging.getLogger("infini_llama.train")


def train(
    config: PipelineConfig,
    dataset: DatasetRef,
    environment: PatchedEnvironment,
    invocation: str,
    verify_on_read: bool = False,
    each_poll: Callable[[], None] = lambda: None,
) -> RunSummary:
    """Train the run `config.runtime.name` on `dataset` under an environment plan, which is pinned here.

    Retry policy by exit code: see docs/resume.md.

    Args:
        environment: the plan, and the record that is written here.
        invocation: of `attempt.new_invocation`: `runtime.resume` is followed once per command.
        verify_on_read: shards are checked when they are first opened, since verify-data has not read them.
        each_poll: called a few times per second; an Exception that it raises is a failure, anything else a request to stop.

    Returns:
        the summary (also runs/<name>/summary.json); `already_finished` if there was nothing left to do.

    Raises:
        ConfigError, DataError: it is not retried.
        Preempted: this process was asked to stop; where a step was done, a checkpoint is committed.
        TrainFailed: the workers failed; `retryable` says whether another call may help.
        Busy: another process, here or on another machine, trains this run.
    """
    run = RunFolder(config.runtime.home.resolve() / "runs" / config.runtime.name)
    with take(run, config.runtime, each_poll) as (lock, poll):
        plan = environment.plan
        model, settings, lineage = bind(run, config, dataset, plan)
        run.write(run.environment, environment.record)
        stages = in_samples(config, dataset, lineage.curriculum_ends or (), lineage.max_steps)
        if summary := finished(run, lineage.max_steps, config.train.early_stopping_patience):
            if config.runtime.resume == "never" and not is_retry(run, invocation):
                checkpoints.refuse_any(run.checkpoints)
            log.info("run %s is finished: %d steps, nothing to do", run.path.name, summary.steps)
            return summary.model_copy(update={"already_finished": True})
        with locked(
            gpus_of(environment.record.facts, plan) if config.environment.launcher == "local" else [], poll
        ) as gpus:
            context = RunContext(
                run=run,
                config=config,
                train=settings,
                dataset=dataset,
                model=model,
                plan=plan,
                curriculum=stages,
                verify_on_read=verify_on_read,
                invocation=invocation,
                locks=(lock, *gpus),
                each_poll=poll,
            )
            return attempts_until_finished(context)


@contextmanager
def take(
    run: RunFolder, runtime: RuntimeConfig, each_poll: Callable[[], None]
) -> Generator[tuple[Lock, Callable[[], None]]]:
    """Inside, no other command trains the run, on this machine (the lock) or on another (the lease).

    Yields:
        the lock; and `each_poll`, which now also raises Busy if the lease is lost.

    Raises:
        Busy: another one does.
        TrainFailed: the disk is full.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    with (
        disk_full_as(f"the run in {run.path}", TrainFailed),
        Lock(run.path / "lock", wait=grace_period(run, runtime) + 5) as lock,
        Lease(run.path / "lease") as lease,
    ):

        def poll() -> None:
            lease.check()
            each_poll()

        yield lock, poll


def bind(
    run: RunFolder, config: PipelineConfig, dataset: DatasetRef, plan: EnvironmentPlan
) -> tuple[LlamaConfig, TrainingConfig, Lineage]:
    """The architecture and the resolved settings of a run, and the lineage that binds its folder to them.

    Raises:
        ConfigError: the settings contradict each other, or the folder belongs to another run.
    """
    initial = initial_weights(config.train.init_from, run.read_lineage())
    vocabulary = (initial or dataset).vocab_size
    model = LlamaConfig.from_dict(config.model.architecture(vocabulary, dataset.sequence_length))
    settings = resolved_settings(config, plan, resolve_max_steps(config.train, dataset, run.path.parents[1]))
    refuse_stages(config)  # before the run is bound to them
    return model, settings, claim(run, config, settings.model_dump(mode="json"), model, dataset, initial)


def attempts_until_finished(context: RunContext) -> RunSummary:
    """Make attempts until the run is finished or the stage does not retry."""
    while True:
        outcome = attempt(context)
        if outcome.kind == "done":
            return summarize(context.run, context.dataset.validation.unigram_entropy_bits)
        if not should_retry(context, outcome):
            raise failure(outcome)


def should_retry(context: RunContext, outcome: Outcome) -> bool:
    """Whether this stage itself makes another attempt, having prepared it."""
    runtime = context.config.runtime
    if outcome.code == ExitCode.PREEMPTED:
        log.warning("the workers received a stop signal and %s; resuming immediately", outcome.message)
        return True
    if outcome.code == ExitCode.HUNG:
        log.warning("%s; the workers were ended", outcome.message)
        return hangs_without_progress(context.run, context.invocation) <= runtime.retries
    if outcome.code == ExitCode.OUT_OF_MEMORY:
        log.warning("out of memory: %s", outcome.message)
        return halve_micro_batch(context)
    if outcome.code == ExitCode.DIVERGED and outcome.error is not None:
        log.warning("diverged: %s", outcome.message)
        train, rows = context.config.train, context.dataset.train.rows
        spare = None if train.repeat_data else rows - context.max_steps * train.global_batch_size
        return roll_back(context.run, outcome.error, runtime.max_rollbacks, spare)
    return False


def hangs_without_progress(run: RunFolder, invocation: str) -> int:
    """Hung attempts of this command since the checkpoint that is the newest now."""
    step = checkpoints.latest_step(run.checkpoints)
    mine = [record for record in attempts(run) if record.invocation == invocation]
    return sum(record.code == ExitCode.HUNG and record.checkpoint_step == step for record in mine)


def finished(run: RunFolder, max_steps: int, patience: int | None) -> RunSummary | None:
    """The summary of a run that has all its steps or more, or stopped early by this patience, and whose last checkpoint is complete.

    A summary that cannot be read is none: the attempt that follows has no step left to do and writes it again.
    """
    if not (fields := run.read_or_rebuild(run.summary)):
        return None
    try:
        steps = steps if isinstance(steps := fields.get("steps"), int) else 0
        summary = as_record(RunSummary, fields | paths_of(run, steps), run.summary)
    except Damaged as fault:
        log.warning("%s It is written again.", fault)
        return None
    early = summary.stopped_early
    done = summary.steps >= max_steps or (early is not None and early == patience)
    if not done or summary.steps != checkpoints.latest_step(run.checkpoints):
        return None
    if not checkpoints.is_digest_at(run.checkpoints, summary.steps, summary.checkpoint_digest):
        log.warning("%s is not of checkpoint %s; it is written again.", run.summary, summary.checkpoint.name)
        return None
    return summary


def failure(outcome: Outcome) -> Exception:
    """The exception for a failed attempt; `retries.py` decides whether an unexpected end is retried."""
    if outcome.code == ExitCode.INVALID_CONFIG:
        return ConfigError(outcome.message)
    if outcome.code == ExitCode.INVALID_DATA:
        return DataError(outcome.message)
    return TrainFailed(outcome.message, exit_code=outcome.code, retryable=outcome.code == ExitCode.UNEXPECTED)


def summarize(run: RunFolder, unigram_entropy_bits: float) -> RunSummary:
    """Write summary.json of a finished run.

    Args:
        unigram_entropy_bits: of the validation split, per token.
    """
    record = RunRecord(run.path)
    result = as_record(TrainingResult, run.read(run.result), run.result)
    tokens = checkpoints.read_state(checkpoints.checkpoint_path(run.checkpoints, result.steps)).tokens
    losses, seconds = record.train_losses, record.step_seconds
    last = record.validated[-1] if record.validated else ValidationLine(step=0)
    fields = result.to_json() | paths_of(run, result.steps)
    fields |= {
        "run": record.name,
        "train_loss": losses[-1] if losses else None,
        "validation_loss": last.loss,
        "validation_bits_per_token": None if last.loss is None else last.loss / math.log(2),
        "unigram_entropy_bits": unigram_entropy_bits,
        "bits_per_byte": last.bits_per_byte,
        "best_validation_loss": min(record.validation_losses, default=None),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "updates_left_out": len(record.trained) - len(losses),
        "attempts": len(record.attempts),
        "goodput": record.goodput.to_json(),
    }
    summary = RunSummary.from_json(fields)
    run.write(run.summary, summary)
    return summary


def paths_of(run: RunFolder, steps: int) -> JsonObject:
    """Where the finished run's files are now; a folder may have been moved since the summary was written."""
    paths = RunPaths(
        run=run.path,
        tensorboard=run.path / "tensorboard",
        loss_curve=run.path / "loss.png",  # written by the caller, as the page is
        report=run.path / "report.html",
    )
    return {"checkpoint": str(checkpoints.checkpoint_path(run.checkpoints, steps)), "paths": paths.to_json()}
