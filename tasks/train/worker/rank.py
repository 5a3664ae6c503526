"""One rank from start to end: the trainer's outcome becomes an exit code and a status file."""

import contextlib
import faulthandler
import logging
import re
import signal
import traceback
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from infini_llama.configs.errors import (
    Diverged,
    ExitCode,
    PipelineError,
    error_message,
    is_out_of_memory,
    no_space,
)
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.status import RankError
from infini_llama.tasks.runs.goodput import LEDGER, Ledger
from infini_llama.tasks.runs.heartbeat import Heartbeat
from infini_llama.tasks.runs.status import write_status
from infini_llama.tasks.train.worker.callbacks.profiler import dump_gpu_memory, memory
from infini_llama.tasks.train.worker.preflight import preflight
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.trainer import StopRequest, Trainer

GLOO = re.compile(r"\[\S*\bgloo/\S+\.\w+:\d+\]")
# Phases in which the samples of the step may be the cause of a failure.
ON_SAMPLES = ("data", "compute")
log = logging.getLogger("infini_llama.worker")


def exit_code(error: BaseException) -> int:
    """The exit code of a failure (docs/resume.md)."""
    if isinstance(error, PipelineError):
        return error.exit_code
    return ExitCode.OUT_OF_MEMORY if is_out_of_memory(error) else ExitCode.UNEXPECTED


def peer_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone.

    gloo raises a RuntimeError that begins with a place in its source.
    """
    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and GLOO.match(str(error)) is not None


def root_cause(error: BaseException) -> BaseException:
    """The exception below DCP's wrapper: the first rank's own; a full disk becomes a sentence."""
    if isinstance(error, CheckpointException) and error.failures:
        first_failure = next(iter(error.failures.values()))
        error = first_failure[0]
    sentence = no_space(error)
    return PipelineError(sentence) if sentence else error


def describe(error: BaseException, heartbeat: Heartbeat) -> RankError:
    """The error of a status file: what failed, and in which phase.

    It also has the samples and the memory of the failure, where they can be had.
    """
    rows = None
    bytes_used = dict[str, int]()
    # A row table that cannot be read may be the very failure.
    with contextlib.suppress(Exception):
        if heartbeat.sample_rows and heartbeat.phase in ON_SAMPLES:
            rows = heartbeat.sample_rows()
    # After some errors, every call of CUDA raises again.
    with contextlib.suppress(Exception):
        bytes_used = memory()
    return RankError(
        type=type(error).__name__,
        message=error_message(error),
        traceback="".join(traceback.format_exception(error)),
        peer_lost=peer_lost(error),
        phase=heartbeat.phase,
        sample_rows=None if rows is None else tuple(rows),
        memory=bytes_used,
        first_skip=error.first_skip if isinstance(error, Diverged) else None,
        samples=error.samples if isinstance(error, Diverged) else None,
    )


def run_rank(attempt: AttemptPlan, attempt_dir: Path, rank: int) -> int:
    """Train; returns this rank's exit code after writing its status."""
    faulthandler.enable()
    # The supervisor requests stacks by it.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    ledger = None
    if rank == 0:
        ledger = Ledger(attempt_dir / LEDGER, attempt.started, attempt.goodput)
    heartbeat = Heartbeat(attempt_dir, rank, ledger)
    if attempt.plan.nnodes > 1:
        heartbeat.publish()
    write_status(attempt_dir, rank, "running", ExitCode.UNEXPECTED)
    torch.set_num_threads(attempt.plan.threads)
    try:
        stop = StopRequest()
        plan = attempt.plan
        timeout = attempt.config.environment.communication_timeout
        store = preflight(attempt)
        ranks = Ranks(plan.device, plan.distributed_backend, timeout, store)
        trainer = Trainer(attempt, ranks, stop, heartbeat)
        outcome = trainer.fit()
        code = ExitCode.FINISHED if outcome == "done" else ExitCode.PREEMPTED
        write_status(attempt_dir, rank, outcome, code, trainer.state.step)
        try:
            ranks.leave()
        except Exception:  # all is saved; the others may have ended already
            log.exception("leaving the process group failed")
        trainer.metrics.close_reporters(outcome == "done")
        return code
    except BaseException as raised:
        error = root_cause(raised)
        log.error("rank %d failed", rank, exc_info=raised)
        # On a full disk only the log above is written.
        with contextlib.suppress(OSError):
            write_status(
                attempt_dir,
                rank,
                "failed",
                exit_code(error),
                heartbeat.step,
                describe(error, heartbeat),
            )
        if isinstance(error, torch.OutOfMemoryError):
            # The snapshot is for people; the status is what decides.
            with contextlib.suppress(Exception):
                dump_gpu_memory(attempt_dir / f"memory-{rank}.pickle")
        return exit_code(error)
