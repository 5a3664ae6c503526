"""Locks that decide who may write.

`Lock` is for the processes of a machine, `Lease` for machines whose file system shares no locks. A
lock dies with its holder: `flock`, which the kernel frees at any end of a process, `kill -9`
included.
"""

import errno
import fcntl
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from infini_llama.configs.errors import ConfigError, DataError, PipelineError
from infini_llama.configs.reading import changed
from infini_llama.tasks.records.record import Record
from infini_llama.tasks.storage.files import write_atomic

# Of a filesystem without flock.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
RENEW = 5.0  # seconds between renewals
BOOT = Path("/proc/sys/kernel/random/boot_id")
FOREVER = 10.0**9  # seconds
LOG_AFTER = 2.0  # seconds of a wait
EXPIRED = 30.0  # seconds without one after which the holder is taken for dead
log = logging.getLogger("infini_llama.locks")


class Busy(PipelineError):
    """Another process holds the lock; the message names it."""


class LockRecord(Record):
    """The record that the holder of a lock writes into its file.

    Attributes:
        since: ISO 8601.
    """

    pid: int
    host: str
    since: str


class Lock:
    """A `flock` on a file.

    The kernel frees it when the last process that holds its descriptor ends.

    Args:
        path: created where it does not exist; never deleted.
        wait: seconds to wait for another holder.
        setting: what names the folder that the file is in, for the message.
        shared: several processes may hold it shared at once, and none of them is named in the file;
            otherwise it is exclusive.

    Raises:
        DataError: on entering, when the path is a folder.
        ConfigError: on entering, when the filesystem has no locks, or the folder cannot be written.
        Busy: on entering, when another process still holds it; names host and process.
    """

    def __init__(
        self,
        path: Path,
        wait: float = 0.0,
        setting: str = "runtime.home",
        *,
        shared: bool = False,
    ) -> None:
        self.path = path
        self.wait = wait
        self.setting = setting
        self.shared = shared

    def __enter__(self) -> "Lock":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self.fd = os.open(self.path, flags, 0o666)  # less the umask
        except IsADirectoryError:
            raise DataError(
                f"{self.path} is a folder, but the name of a lock file; remove it."
            ) from None
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise ConfigError(
                f"{self.path} cannot be written ({error.strerror}); set {self.setting} to a folder "
                "that you may write."
            ) from error
        try:
            self._acquire()
            since = datetime.now(UTC).isoformat(timespec="seconds")
            record = LockRecord(
                pid=os.getpid(),
                host=socket.gethostname(),
                since=since,
            )
            os.ftruncate(self.fd, 0)
            if not self.shared:
                # Only for people: on a full disk, `gc` needs the lock to free space.
                with suppress(OSError):
                    os.pwrite(self.fd, record.model_dump_json().encode(), 0)
        except BaseException:
            os.close(self.fd)
            raise
        return self

    def _acquire(self) -> None:
        kind = fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX
        began = time.monotonic()
        is_logged = False
        while True:
            try:
                fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited >= self.wait:
                    raise Busy(
                        f"{self.path} is locked by {_who(self.fd)}; wait until it ends, or stop "
                        "it, and run the same command again."
                    ) from None
                if waited >= LOG_AFTER and not is_logged:
                    is_logged = True
                    log.info("waiting: %s is locked by %s", self.path, _who(self.fd))
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                raise ConfigError(
                    f"the filesystem of {self.path} has no file locks ({error.strerror}), which "
                    f"keep a second command from writing the same files; set {self.setting} to a "
                    "folder on another filesystem, or mount this one with locks (for NFS "
                    "local_lock=flock, for Lustre localflock)."
                ) from error

    def check(self) -> None:
        """Raise Busy once the file has another place or none.

        Whoever comes next would lock another file, and work beside this process.
        """
        try:
            is_there = os.path.samestat(os.fstat(self.fd), self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        except OSError:  # the disk does not answer just now
            return
        if not is_there:
            raise Busy(
                f"{self.path} was moved or removed while this process was working in "
                f"{self.path.parent}; it must not continue here. Stop a command before moving or "
                "removing its folder."
            )

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def lock_holder(path: Path) -> str | None:
    """The holder of the lock, for people; None if it is free, or cannot be locked here.

    A newcomer at this very moment is turned away once.
    """
    if not path.exists():
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _who(descriptor)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    finally:
        os.close(descriptor)
    return None


def _who(descriptor: int) -> str:
    try:
        record = LockRecord.model_validate_json(os.pread(descriptor, 4096, 0))
        return f"process {record.pid} on {record.host} since {record.since}"
    except ValueError:  # it has the lock and has not written yet
        return "another process"


def running_kernel() -> str:
    """The ID of this boot of this machine; the host's name where the system does not state one."""
    try:
        return BOOT.read_text(encoding="utf-8").strip()
    except OSError:
        return socket.gethostname()


def this_machine() -> str:
    """An ID that distinguishes processes with one number.

    It is this kernel, and the set of process numbers that this process lives in. Containers and
    pods on one kernel have their own numbers.
    """
    try:
        return f"{running_kernel()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return running_kernel()


class LeaseRecord(Record):
    """The content of a lease's file: a process, and how often it has renewed the lease."""

    kernel: str
    host: str
    pid: int
    renewed: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lease:
    """A lease, held from entering to leaving, and renewed by a thread meanwhile.

    Whether a holder lives is seen by its file changing, so that no two clocks need to agree.

    Args:
        path: of the lease's file; its folder exists.
        kernel: what tells this machine from others: the identity of its running kernel, which
            containers on it share, as they do its locks.

    Raises:
        Busy: on entering, when a holder on another machine renews it; names host and process.
    """

    def __init__(
        self,
        path: Path,
        kernel: str | None = None,
        renew: float = RENEW,
        expired: float = EXPIRED,
    ) -> None:
        self.path = path
        self.renew = renew
        self.expired = expired
        self.mine = LeaseRecord(
            kernel=kernel or running_kernel(),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self.ended = threading.Event()
        self.taken_by = ""

    def __enter__(self) -> "Lease":
        rival = self._rival()
        if rival:
            self._outlast(rival)
        self._write(0)
        if rival:
            # Of several that found it expired, the last to write has it.
            time.sleep(self.renew)
            rival = self._rival()
            if rival:
                raise self._busy(rival)
        self.thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        if not self._rival():
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise Busy once another machine has taken the lease.

        This one was away for longer than it lasts.
        """
        if self.taken_by:
            raise Busy(
                f"{self.path} was taken over by {self.taken_by} while this process did not "
                "respond; it must not continue here."
            )

    def _keep(self) -> None:
        count = 0
        while not self.ended.wait(self.renew):
            rival = self._rival()
            if rival:
                self.taken_by = str(rival)
                return
            count += 1
            with suppress(OSError):  # a full or absent disk: the workers will report it
                self._write(count)

    def _outlast(self, rival: LeaseRecord) -> None:
        """Wait until `rival` has not renewed for as long as a lease lasts."""
        log.info(
            "waiting up to %g s: %s may still use %s",
            self.expired,
            rival,
            self.path.parent,
        )
        until = time.monotonic() + self.expired
        while time.monotonic() < until:
            time.sleep(self.renew / 5)
            now = self._rival()
            if now is None:  # it has ended
                return
            if now != rival:
                raise self._busy(now)

    def _rival(self) -> LeaseRecord | None:
        """The lease that another machine has written there."""
        try:
            lease = LeaseRecord.model_validate_json(self.path.read_bytes())
        except (OSError, ValueError):
            return None
        return lease if lease.kernel != self.mine.kernel else None

    def _busy(self, rival: LeaseRecord) -> Busy:
        return Busy(
            f"{self.path.parent} is in use by {rival}; wait until it ends, or stop it, and run the "
            "same command again."
        )

    def _write(self, count: int) -> None:
        write_atomic(self.path, changed(self.mine, renewed=count).model_dump_json())
