"""One rank from start to last word: whatever happens in the loop becomes an exit code and a status file."""

import contextlib
import faulthandler
import logging
import signal
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from infini_llama.configs.errors import PipelineError, no_space
from infini_llama.tasks.records.goodput import Goodput, StartTime
from infini_llama.tasks.records.status import RankError
from infini_llama.tasks.runs.goodput import LEDGER, Ledger
from infini_llama.tasks.runs.heartbeat import Heartbeat
from infini_llama.tasks.runs.status import write_status
from infini_llama.tasks.train.worker import preflight
from infini_llama.tasks.train.worker.callbacks.divergence import Diverged
from infini_llama.tasks.train.worker.failure import describe, dump_gpu_memory
from infini_llama.tasks.train.worker.loop import StopRequest, run
from infini_llama.tasks.train.worker.strategies.ranks import Ranks

EXIT_CODES = {"done": 0, "preempted": 75}
log = logging.getLogger("infini_llama.worker")


def exit_code(error: BaseException) -> int:
    """The class of a failure as an exit code (docs/resume.md)."""
    if isinstance(error, PipelineError):
        return error.exit_code
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(
        error
    ):  # torch on a CPU
        return 71
    if isinstance(error, Diverged):
        return 72
    return 70


def root_cause(error: BaseException) -> BaseException:
    """What lies below DCP's wrapper: the first rank's own exception, and a full disk in words."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    sentence = no_space(error)
    return PipelineError(sentence) if sentence else error


def serve(order: dict, attempt_dir: Path, rank: int) -> int:
    """Runs the loop; returns this rank's exit code after writing its status."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the supervisor asks for stacks by it
    ledger = (
        Ledger(attempt_dir / LEDGER, StartTime.from_json(order["began"]), Goodput.from_json(order["spent"]))
        if rank == 0
        else None
    )
    heart = Heartbeat(attempt_dir, rank, ledger)
    write_status(attempt_dir, rank, "running", 70)
    torch.set_num_threads(order["plan"]["threads"])
    try:
        stop = StopRequest()
        waits = order["config"]["environment"]
        ranks = Ranks(
            order["plan"]["device"],
            order["plan"]["distributed_backend"],
            waits["communication_timeout"],
            preflight.limit(waits, order["plan"]["nnodes"]),
        )
        state, step = run(order, ranks, stop, heart)
        write_status(attempt_dir, rank, "done" if state == "done" else "preempted", EXIT_CODES[state], step)
        ranks.leave()
        return EXIT_CODES[state]
    except BaseException as raised:
        error = root_cause(raised)
        log.error("rank %d failed", rank, exc_info=raised)
        if isinstance(raised, torch.OutOfMemoryError):
            dump_gpu_memory(attempt_dir / f"memory-{rank}.pickle")
        with contextlib.suppress(OSError):  # on a full disk the log above is the last word
            write_status(
                attempt_dir, rank, "failed", exit_code(error), heart.step, RankError.from_json(describe(error, heart))
            )
        return exit_code(error)
