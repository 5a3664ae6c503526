"""Stop of an attempt's workers, and the grace period that they get to save a checkpoint."""

import logging
import os
import socket
import time
from contextlib import suppress

from infini_llama.configs.schema import RuntimeConfig
from infini_llama.tasks.records.attempt_plan import AttemptPlan
from infini_llama.tasks.records.metrics import MetricsLine, TrainLine, ValidationLine
from infini_llama.tasks.runs.run_folder import RunFolder, read_metrics
from infini_llama.tasks.runs.signals import ONE_REQUEST_SECONDS
from infini_llama.tasks.train.launch import TorchrunWorkers

log = logging.getLogger("infini_llama.train")
COMMAND_END_SECONDS = 5.0  # that this process takes after its workers


def grace_period(run: RunFolder, runtime: RuntimeConfig) -> float:
    """Seconds that the workers get.

    That is `runtime.grace_period`, or what a save has been seen to need, where that is more.
    """
    try:
        return max(runtime.grace_period, stop_seconds(read_metrics(run)))
    except (OSError, ValueError):
        # metrics.jsonl cannot be read just now.
        return runtime.grace_period


def stop_seconds(lines: list[MetricsLine]) -> float:
    """Seconds from a request to the last rank's end, by the slowest that these lines have measured.

    The step that is under way, an evaluation where one is due, the end of a save in the background
    and the save itself; half as much again, since the next one may be slower. 0 before anything was
    measured.
    """
    steps = [line for line in lines if isinstance(line, TrainLine)]
    step = max((line.step_time for line in steps), default=0.0)
    save = max((line.save_time for line in steps), default=0.0)
    write = max((line.save_write_time for line in steps), default=0.0)
    return 1.5 * (step + longest_evaluation(lines) + save + 2 * max(write, save))


def longest_evaluation(lines: list[MetricsLine]) -> float:
    """Seconds of the slowest evaluation; 0 before one was measured."""
    validations = [line for line in lines if isinstance(line, ValidationLine)]
    return max((line.evaluation_time for line in validations), default=0.0)


def stop_workers(
    attempt: AttemptPlan, workers: TorchrunWorkers, request: BaseException | None = None
) -> BaseException | None:
    """Let the workers save and end within the grace period.

    A second request ends them at once (by the caller). What interrupts this within a second is the
    same request: Prefect and Ctrl-C have signal handlers of their own, which raise it as often as
    it comes.

    Args:
        request: why; None: for a fault.

    Returns:
        `request`, or the first that came meanwhile.
    """
    requested = time.monotonic()
    while True:
        try:
            # First: metrics.jsonl, from which the grace period follows, may take long to read.
            workers.request_stop()
            grace = grace_period(RunFolder(attempt.run_dir), attempt.config.runtime)
            log.warning(
                "stop requested; waiting up to %.0f s for a checkpoint "
                "(a second signal exits immediately)",
                grace,
            )
            notify_systemd(grace)
            workers.end_within(grace)
            return request
        except Exception:
            raise
        except BaseException as interruption:
            if request is None:
                request = interruption
                requested = time.monotonic()
            elif time.monotonic() - requested > ONE_REQUEST_SECONDS:
                log.warning(
                    "second signal received: exiting now; the newest valid checkpoint remains"
                )
                return request


def notify_systemd(seconds: float) -> None:
    """Request from systemd the time that the checkpoint takes (sd_notify(3)).

    It is only sent where systemd is the one that stops this process.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    microseconds = int((seconds + COMMAND_END_SECONDS) * 1e6)
    path = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.connect(path)
        notify.sendall(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={microseconds}".encode())
        log.info("asked systemd for %.0f s to stop", seconds + COMMAND_END_SECONDS)
