"""The command that leads a run, as another machine sees it: whether it lives, what it has started, how it has ended."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from infini_llama.configs.errors import ExitCode
from infini_llama.tasks.clusters.node_records import is_over
from infini_llama.tasks.runs.job_file import job_path
from infini_llama.tasks.runs.run_folder import RunFolder, attempt_folders, attempts, number_of
from infini_llama.tasks.storage.lease import EXPIRED, RENEW
from infini_llama.tasks.train.supervisor import AWAY_SECONDS

# Ends of a leader after which it does not come back by itself.
ORDERLY = (ExitCode.FINISHED, ExitCode.INVALID_CONFIG, ExitCode.INVALID_DATA, ExitCode.PREEMPTED)


class Leader:
    """Watches the run's lease from entering to leaving.

    A thread reads it, so that a filesystem that does not answer does not keep this process from noticing. No clocks are
    compared: the leader lives while its file keeps changing.

    Args:
        lease: the file's path.
        expired: seconds without a change after which the leader is taken for dead.
        every: seconds between two readings.
    """

    def __init__(
        self,
        lease: Path,
        expired: float = EXPIRED,
        every: float = RENEW / 5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease, self.expired, self.every, self.clock = lease, expired, every, clock
        self.found: str | None = None  # what the thread has read last; None: there is no leader
        self.was_seen = False
        # What was found at the last question, the seconds since that was new, and when the question was:
        self.seen: str | None = None
        self.silent, self.polled = 0.0, clock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="leader", daemon=True)

    @property
    def lives(self) -> bool:
        """To be asked a few times a second; of a longer silence between two questions this process itself was stopped."""
        now, found = self.clock(), self.found
        self.silent = 0.0 if found != self.seen else self.silent + min(now - self.polled, AWAY_SECONDS)
        self.seen, self.polled = found, now
        return found is not None and self.silent < self.expired

    def __enter__(self) -> "Leader":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def _watch(self) -> None:
        while not self.ended.is_set():
            try:
                self.found = self.lease.read_text(encoding="utf-8")
            except FileNotFoundError:  # given back
                self.found = None
            except OSError:  # the filesystem does not answer
                pass
            self.was_seen = True
            self.ended.wait(self.every)


def newest_attempt(run: RunFolder) -> Path | None:
    """The folder of the newest attempt, where that has a job and has not ended."""
    started = [folder for folder in attempt_folders(run) if job_path(folder).exists()]
    if not started:
        return None
    recorded = {record.attempt for record in attempts(run)}
    return None if number_of(started[-1]) in recorded or is_over(started[-1]) else started[-1]


def end_of(run: RunFolder, leader: Leader) -> int | None:
    """The exit code with which the leader has left the run for good; None where it is there or may come back."""
    if leader.lives or not leader.was_seen:
        return None
    begun = max(map(number_of, attempt_folders(run)), default=0)
    ends = attempts(run)
    if not ends or ends[-1].attempt < begun:  # it was killed in its newest attempt
        return None
    code = ends[-1].code
    return code if code in ORDERLY else None
