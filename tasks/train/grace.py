"""How long workers may take to stop with a checkpoint: what was measured, what the configuration says, what the orchestrator allows."""

import logging
import os
import socket
from contextlib import suppress

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import RuntimeConfig
from infini_llama.tasks.records.metrics import MetricsLine, TrainLine, ValidationLine
from infini_llama.tasks.runs.run_folder import RunFolder, read_metrics

MARGIN = 5.0  # seconds between the end of the workers and the orchestrator's SIGKILL
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
    """Seconds that the workers get: `runtime.grace_period`, or what a save has been seen to need, where that is more.

    Raises:
        ConfigError: the orchestrator (`runtime.orchestrator_grace`) kills everything before that.
    """
    measured, allowed = needed(read_metrics(run)), runtime.orchestrator_grace
    wanted = max(runtime.grace_period, measured)
    if allowed is None or wanted + MARGIN <= allowed:
        return wanted
    if measured + MARGIN > allowed:
        raise ConfigError(
            f"runtime.orchestrator_grace={allowed:g}: stopping with a checkpoint was measured to take up to "
            f"{measured:.0f} s, plus {MARGIN:.0f} s to exit; allow at least {measured + MARGIN:.0f} s there "
            "(Kubernetes: "
            "terminationGracePeriodSeconds, Slurm: --signal, systemd: TimeoutStopSec) and here."
        )
    return max(1.0, allowed - MARGIN)  # what was asked for does not fit, what is needed does


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
