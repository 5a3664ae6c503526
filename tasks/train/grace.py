"""How long workers may take to stop with a checkpoint: what the configuration says, or what was measured where that is more."""

import logging
import os
import socket
from contextlib import suppress

from infini_llama.configs.schema import RuntimeConfig
from infini_llama.tasks.records.metrics import MetricsLine, TrainLine, ValidationLine
from infini_llama.tasks.runs.run_folder import RunFolder, read_metrics

MARGIN = 5.0  # seconds that this process takes after its workers
log = logging.getLogger("infini_llama.train")


def needed(lines: list[MetricsLine]) -> float:
    """Seconds from a request to the last rank's end, by the slowest of what these lines have measured.

    The step that is under way, an evaluation where one is due, the end of a save in the background and the save itself; half
    as much again, since the next one may be slower. 0 before anything was measured.
    """
    steps = [line for line in lines if isinstance(line, TrainLine)]
    step = max((line.step_time for line in steps), default=0.0)
    save = max((line.save_time for line in steps), default=0.0)
    write = max((line.save_write_time for line in steps), default=0.0)
    evaluation = max((line.evaluation_time for line in lines if isinstance(line, ValidationLine)), default=0.0)
    return 1.5 * (step + evaluation + save + 2 * max(write, save))


def grace_period(run: RunFolder, runtime: RuntimeConfig) -> float:
    """Seconds that the workers get: `runtime.grace_period`, or what a save has been seen to need, where that is more."""
    return max(runtime.grace_period, needed(read_metrics(run)))


def request_time_to_stop(seconds: float) -> None:
    """Request of systemd, where it is the one that stops this process, for the time that the checkpoint takes (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    microseconds = int((seconds + MARGIN) * 1e6)
    path = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.connect(path)
        notify.sendall(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={microseconds}".encode())
        log.info("asked systemd for %.0f s to stop", seconds + MARGIN)
