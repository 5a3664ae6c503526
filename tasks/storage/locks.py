"""A lock that dies with its holder: `flock`, which the kernel frees at any end of a process, `kill -9` included."""

import fcntl
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from infini_llama.configs.errors import DataError, PipelineError
from infini_llama.tasks.records.record import Record


class Busy(PipelineError):
    """Another process holds the lock; the message names it."""


class LockRecord(Record):
    """What the holder of a lock writes into its file. since: ISO 8601."""

    pid: int
    host: str
    since: str


class Lock:
    """An exclusive `flock` on a file, freed by the kernel when the last process that holds its descriptor ends.

    Args:
        path: created where it does not exist; never deleted.
        wait: seconds to wait for another holder.

    Raises:
        DataError: on entering, when the path is a folder.
        Busy: on entering, when another process still holds it; names host and process.
    """

    def __init__(self, path: Path, wait: float = 0.0) -> None:
        self.path, self.wait = path, wait

    def __enter__(self) -> "Lock":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except IsADirectoryError:
            raise DataError(f"{self.path} is a folder, but the name of a lock file; remove it.") from None
        try:
            self._acquire()
            since = datetime.now(UTC).isoformat(timespec="seconds")
            record = LockRecord(pid=os.getpid(), host=socket.gethostname(), since=since)
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, record.model_dump_json().encode(), 0)
        except BaseException:
            os.close(self.fd)
            raise
        return self

    def _acquire(self) -> None:
        deadline = time.monotonic() + self.wait
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Busy(
                        f"{self.path} is locked by {_who(self.fd)}; wait until it ends, or stop it, and run the same "
                        "command again."
                    ) from None
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def lock_holder(path: Path) -> str | None:
    """Who holds the lock, for people; None if it is free. A newcomer at this very moment is turned away once."""
    if not path.exists():
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _who(descriptor)
    finally:
        os.close(descriptor)
    return None


def _who(descriptor: int) -> str:
    try:
        record = LockRecord.model_validate_json(os.pread(descriptor, 4096, 0))
        return f"process {record.pid} on {record.host} since {record.since}"
    except ValueError:  # it has the lock and has not written yet
        return "another process"
