"""Files that survive a crash: on the disk, and whole or not there."""

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from infini_llama.configs.errors import DataError

# Made by systems and network disks in folders of any content, beside hidden ones.
OF_SYSTEMS = {
    "lost+found",
    "System Volume Information",
    "$RECYCLE.BIN",
    "@eaDir",
    "Thumbs.db",
    "desktop.ini",
}


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk.

    For a folder, it waits only where its filesystem can do that.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if (
            error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
            or not path.is_dir()
        ):
            raise
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no reader looks at, and that no other process has."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def mark_used(path: Path) -> None:
    """Set the time of what `gc` deletes where it was not used for long.

    It does nothing where the file is another user's, or the disk is only read.
    """
    with suppress(OSError):
        os.utime(path)


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` with `text` as a whole.

    A reader sees the old content or the new, also after a crash.

    Raises:
        DataError: `path` is a folder.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except IsADirectoryError:
        raise DataError(
            f"{path} is a folder, but the name of a file; move it aside."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
