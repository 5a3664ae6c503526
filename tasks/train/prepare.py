"""What happens before an attempt's workers start: the checkpoint is chosen, and their job is written."""

import logging
import os
import shutil
import time
from pathlib import Path

from infini_llama.configs.errors import ConfigError, ExitCode
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.goodput import StartTime
from infini_llama.tasks.records.job import TrainingJob
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.goodput import goodput
from infini_llama.tasks.runs.job_file import write_job
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    append_attempt,
    attempt_folders,
    attempts,
    cut_metrics,
    number_of,
    remove_staging,
    warn_of_lacking_steps,
)
from infini_llama.tasks.storage.json_lines import unreadable
from infini_llama.tasks.storage.lease import this_machine
from infini_llama.tasks.train.lineage import source_weights
from infini_llama.tasks.train.run_context import RunContext

log = logging.getLogger("infini_llama.train")
# Kept free in the attempt's folder for the record of its end, which a full disk would refuse.
RESERVE, RESERVE_BYTES = "reserve", 2**16


def prepare(context: RunContext, grace: float) -> Path:
    """Create the folder of a new attempt, with its job."""
    run = context.run
    remove_staging(run)
    chosen, first_step = choose_checkpoint(context)
    number = record_killed_attempts(run) + 1
    cut_metrics(run, first_step)
    warn_of_lacking_steps(run, first_step)
    attempt_dir = run.path / "logs" / f"attempt-{number:02d}"
    attempt_dir.mkdir(parents=True)
    try:
        write_job(attempt_dir, training_job(context, chosen, first_step, grace))
        (attempt_dir / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))  # not zeros, which some filesystems do not store
    except OSError:
        shutil.rmtree(attempt_dir, ignore_errors=True)  # nothing was started, so there is no attempt to record
        raise
    source = f"from {chosen.name}" if chosen else "from step 0"
    log.info("attempt %d starts %s with %d worker(s)", number, source, context.plan.world_size)
    return attempt_dir


def record_killed_attempts(run: RunFolder) -> int:
    """Record attempts that have a folder but no record: they were killed together with the command that watched them.

    A record without a folder is one whose logs were removed, or not brought along to this machine.

    Returns:
        number of the newest attempt.
    """
    begun = set(map(number_of, attempt_folders(run)))
    recorded = {record.attempt for record in attempts(run)}
    message = "the command was killed"
    if fault := unreadable(run.attempts, AttemptRecord):
        log.warning("%s; its contents are skipped.", fault)
        message = "the command was killed, or the line of its end cannot be read"
    for missing in sorted(begun - recorded):
        killed = AttemptRecord(
            attempt=missing, invocation=None, kind="failed", code=ExitCode.UNEXPECTED, message=message
        )
        append_attempt(run, killed)
    return max(begun | recorded, default=0)


def is_retry(run: RunFolder, invocation: str) -> bool:
    """Whether this command has made an attempt before."""
    return any(record.invocation == invocation for record in attempts(run))


def choose_checkpoint(context: RunContext) -> tuple[Path | None, int]:
    """The checkpoint to start from and its step, None and 0 for a fresh start.

    A rule other than auto holds for the first attempt of a command; a path until the run has a checkpoint of its own since.
    """
    run, resume = context.run, context.config.runtime.resume
    lineage = run.require_lineage()
    if resume in ("must", "never", "best") and is_retry(run, context.invocation):
        resume = "auto"
    chosen = checkpoints.choose(run.checkpoints, resume, lineage.resumed_from)
    first_step = refuse_other_model(chosen, context.model, context.plan) if chosen else 0
    if resume not in ("auto", "must", "never", "best"):
        run.write_lineage(lineage.model_copy(update={"resumed_from": resume}))
    return chosen, first_step


def refuse_other_model(chosen: Path, model: LlamaConfig, plan: EnvironmentPlan) -> int:
    """Step of the checkpoint, once it is known to be of this architecture."""
    state, here = checkpoints.read_state(chosen), model.to_dict()
    there = state.model
    if differing := [key for key in there if key in here and there[key] != here[key]]:
        lines = [f"model.{key}: {there[key]} there, {here[key]} here" for key in differing]
        raise ConfigError(f"checkpoint {chosen} has another architecture:\n  " + "\n  ".join(lines))
    if state.world_size != plan.world_size:
        log.warning(
            "the checkpoint was written by %d worker(s) and is resumed by %d: the samples and their order stay the "
            "same, but sums are rounded differently, so the run is no longer bitwise identical to an "
            "uninterrupted one.",
            state.world_size,
            plan.world_size,
        )
    return state.step


def training_job(context: RunContext, chosen: Path | None, from_step: int, grace: float) -> TrainingJob:
    """What the workers of an attempt that starts from the checkpoint `chosen` are given.

    Args:
        grace: seconds that they may take to save and end.
    """
    lineage, dataset = context.run.require_lineage(), context.dataset
    started = StartTime(wall=time.time(), monotonic=time.monotonic(), machine=this_machine())
    train = context.config.train.model_copy(update={"deepspeed_config": context.train.deepspeed_config})
    return TrainingJob(
        started=started,
        from_step=from_step,
        run_dir=context.run.path,
        dataset=context.dataset_path,
        dataset_digest=dataset.digest,
        chunks=dataset.chunks,
        curriculum=context.curriculum,
        source_weights=source_weights(context.config.data),
        verify_on_read=context.verify_on_read,
        resume_from=chosen,
        init_from=Path(lineage.init_from.path) if lineage.init_from and not chosen else None,
        skipped_samples=lineage.skipped_samples,
        lineage=lineage,
        config=context.config.model_copy(update={"train": train}),
        max_steps=context.max_steps,
        micro_batch_size=context.micro_batch_size(lineage),
        model=context.model,
        plan=context.plan,
        goodput=goodput(context.run, from_step, started.wall),
        grace_period=grace,
    )
