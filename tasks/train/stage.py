"""The training stage: it takes the run's folder and makes attempts.

They end when the run is finished, or when a person has to act.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from infini_llama.configs.reading import changed
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.plan import PlannedEnvironment
from infini_llama.tasks.records.summary import RunSummary
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import RunFolder, attempt_folders
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.storage.artifacts import Damaged
from infini_llama.tasks.storage.files import write_atomic
from infini_llama.tasks.storage.locks import Busy
from infini_llama.tasks.train.attempt import attempts_until_finished
from infini_llama.tasks.train.attempt_folder import record_killed_attempts
from infini_llama.tasks.train.binding import bind_run, goes_back
from infini_llama.tasks.train.locking import (
    LockedRun,
    hold_gpus,
    hold_run,
    identities,
    local_gpus,
)
from infini_llama.tasks.train.planning import is_first_of_command, plan_attempt

log = logging.getLogger("infini_llama.train")


def train(
    config: PipelineConfig,
    dataset: DatasetRef,
    environment: PlannedEnvironment,
    invocation: str,
    verify_on_read: bool = False,
    each_poll: Callable[[], None] = lambda: None,
) -> RunSummary:
    """Train the run `config.runtime.name` on `dataset`, under an environment plan.

    The plan is pinned here. What follows each exit code: `what_follows` in attempt.py.

    Args:
        environment: the plan, and the record that is written here.
        invocation: ID of this command, from `new_invocation`, or of the flow run;
            `runtime.resume` applies to its first attempt only.
        verify_on_read: shards are checked when they are first opened, since verify-data has not
            read them.
        each_poll: called a few times per second; an Exception that it raises is a failure, anything
            else a request to stop.

    Returns:
        the summary (also runs/<name>/summary.json); `already_finished` if there was nothing left to
            do.

    Raises:
        ConfigError, DataError: it is not retried.
        Preempted: this process was asked to stop; a checkpoint of the last step is committed,
            unless the grace period ended first.
        TrainFailed: an attempt failed, and no other is made here.
        Busy: another process, here or on another machine, trains this run.
    """
    run = RunFolder.of(config.runtime)
    with hold_run(run, config.runtime, each_poll) as locked, _bound_by_an_attempt(run):
        plan = environment.plan
        lineage = bind_run(config, dataset, plan)
        record_killed_attempts(run)
        reader = RunReader(run.path)
        is_finished = reader.result is not None and not goes_back(
            config.runtime.resume, lineage
        )
        # A finished run keeps the record of the environment that it was trained in.
        if not is_finished or reader.environment is None:
            run.write(run.environment, environment.record)
        if is_finished:
            return _summary_again(config, run, invocation)
        gpus = identities(
            environment.record.facts, local_gpus(config.environment, plan)
        )
        with hold_gpus(gpus, locked.poll) as gpu_locks:
            attempt = plan_attempt(
                config, dataset, plan, lineage, invocation, verify_on_read
            )
            attempts_until_finished(
                attempt, LockedRun((*locked.locks, *gpu_locks), locked.poll)
            )
            return write_summary(run)


def _summary_again(
    config: PipelineConfig, run: RunFolder, invocation: str
) -> RunSummary:
    """The summary of a run that has nothing left to do."""
    if config.runtime.resume == "never" and is_first_of_command(run, invocation):
        checkpoints.refuse_existing_checkpoints(run.checkpoints)
    summary = write_summary(run)
    log.info("run %s is finished: %d steps, nothing to do", summary.run, summary.steps)
    return changed(summary, already_finished=True)


@contextmanager
def _bound_by_an_attempt(run: RunFolder) -> Generator[None]:
    """Inside, the run is bound to the settings of a command.

    If the stage fails before it makes an attempt, lineage, environment and configuration are put
    back as they were, so that the failed command leaves no trace.
    """
    paths = (run.lineage, run.environment, run.config)
    records = {path: path.read_bytes() for path in paths if path.is_file()}
    made = attempt_folders(run)
    try:
        yield
    except Busy:
        # The folder may be another run's by now.
        raise
    except BaseException:
        if attempt_folders(run) == made:
            for path in paths:
                if path in records:
                    # A damaged record stays damaged.
                    write_atomic(path, records[path].decode(errors="replace"))
                elif path.is_file():
                    path.unlink()
        raise


def write_summary(run: RunFolder) -> RunSummary:
    """Write summary.json of a finished run.

    The summary that is there is kept where metrics.jsonl, which it was made of, has lost its end.

    Raises:
        Damaged: result.json is missing, damaged or not of the newest checkpoint.
    """
    reader = RunReader(run.path)
    summary = reader.summary
    if summary is None:
        raise Damaged(
            f"{run.result} is not the result of the newest checkpoint; run the same command again."
        )
    stored = run.find(RunSummary, run.summary)
    has_lost_lines = reader.last_line < summary.steps
    if has_lost_lines and stored is not None and stored.steps == summary.steps:
        return stored
    run.write(run.summary, summary)
    return summary
