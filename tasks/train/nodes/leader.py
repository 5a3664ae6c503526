"""Whether the command that leads a run still lives, as another machine sees it."""

import threading
import time
from pathlib import Path

from tasks.lease import EXPIRED, RENEW


class Leader:
    """Watches the run's lease from entering to leaving.

    A thread reads it, so that a filesystem that does not answer does not keep this process from noticing. No clocks are
    compared: the leader lives while its file keeps changing.

    Args:
        lease: the file's path.
        expired: seconds without a change after which the leader is taken for dead.
    """

    def __init__(self, lease: Path, expired: float = EXPIRED, every: float = RENEW / 5) -> None:
        self.lease, self.expired, self.every = lease, expired, every
        self.seen, self.changed, self.known = "", float("-inf"), False
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="leader", daemon=True)

    @property
    def lives(self) -> bool:
        return time.monotonic() - self.changed < self.expired

    def __enter__(self) -> "Leader":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def _watch(self) -> None:
        while not self.ended.is_set():
            try:
                found = self.lease.read_text(encoding="utf-8")
                if found != self.seen:
                    self.seen, self.changed = found, time.monotonic()
            except FileNotFoundError:  # given back
                self.seen, self.changed = "", float("-inf")
            except OSError:  # the filesystem does not answer
                pass
            self.known = True
            self.ended.wait(self.every)
