"""Features that the filesystem of the home folder lacks.

exFAT, network filesystems and folders that are shared with containers differ in them.
"""

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from infini_llama.configs.errors import NO_SPACE, ConfigError, PipelineError

# Of a filesystem without memory maps, or a process that may have no more of them.
NO_MAPS = (
    os.strerror(errno.ENOMEM),
    os.strerror(errno.EAGAIN),
    os.strerror(errno.ENODEV),
    os.strerror(errno.EOPNOTSUPP),
    os.strerror(errno.ENOSYS),
)


class Filesystem(NamedTuple):
    """Results of trials in a folder.

    Attributes:
        folder: the home folder, or the one that it would be created in.
        fault: what fails there that datasets and runs need; "" where all works.
        has_links: symbolic links work; without them there is no `latest` and no `best`.
    """

    folder: Path
    fault: str
    has_links: bool


def examine(home: Path) -> Filesystem:
    """Try what a commit and its readers need; `home` is not created.

    They need write, fsync, rename of a folder, a lock and a memory map.
    """
    # Not Path.exists, which raises below a folder that this user may not read.
    folder = next(
        path
        for path in (home.absolute(), *home.absolute().parents)
        if os.access(path, os.F_OK)
    )
    has_links = False
    failing = "files cannot be written"
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".probe-") as scratch:
            before = Path(scratch, "before")
            after = Path(scratch, "after")
            before.mkdir()
            with (before / "file").open("wb") as file:
                file.write(b"probe")
                file.flush()
                os.fsync(file.fileno())
            failing = "folders cannot be renamed"
            before.rename(after)
            with (after / "file").open("rb") as file:
                failing = "files cannot be locked"
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                failing = "files cannot be mapped into memory"
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close()
            failing = ""
            with suppress(OSError):
                Path(scratch, "link").symlink_to("target")
                has_links = True
    except OSError as error:
        fault = f"{failing or 'files cannot be removed'} ({error.strerror or error})"
        return Filesystem(folder, fault, has_links)
    return Filesystem(folder, "", has_links)


def require_usable(
    home: Path,
    folder: Path,
    fault: str,
    setting: str = "runtime.home",
) -> None:
    """Refuse a home folder, which `setting` names, with a fault of `examine`.

    Raises:
        ConfigError: the filesystem lacks something.
        PipelineError: it is full.
    """
    if any(os.strerror(number) in fault for number in NO_SPACE):
        raise PipelineError(
            f"no space at {folder}: {fault}; free space and run the same command again."
        )
    if fault:
        raise ConfigError(
            f"{setting}={home}: {fault} in {folder}; choose a folder that you may write, on a "
            "filesystem with locks and memory maps."
        )


def require_folder(folder: Path, setting: str = "runtime.home") -> None:
    """Examine a folder, and refuse one with a fault; see `require_usable`."""
    tried = examine(folder)
    require_usable(folder, tried.folder, tried.fault, setting)


@contextmanager
def mapping(path: Path) -> Generator[None]:
    """A block that maps a file into memory.

    The system may refuse it, and the file is whole all the same.

    Raises:
        ConfigError: it did. pyarrow's error has the words of the system's, without its number.
    """
    try:
        yield
    except OSError as error:
        why = next((words for words in NO_MAPS if words in str(error)), "")
        if why:
            raise ConfigError(
                f"{path} cannot be mapped into memory ({why}); raise what limits the addresses of "
                "a process (ulimit -v, vm.max_map_count), or set runtime.home to a folder on a "
                "filesystem with memory maps."
            ) from error
        raise


def require_temporary_folder() -> None:
    """Require a folder for temporary files: locks of GPUs and unpacked text are kept there.

    Raises:
        ConfigError: none can be written.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigError(
            "no folder for temporary files can be written (TMPDIR, /tmp, /var/tmp); set TMPDIR to "
            "one that can."
        ) from None
