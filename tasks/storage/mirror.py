"""Copies of committed artifacts beyond this machine, on any filesystem that fsspec knows.

An object store has no rename, so there the manifest is the commit: it is copied last and deleted first, and a folder without one
does not exist for a reader. A fetched artifact is used once every checksum of its manifest holds.
"""

import logging
import shutil
import time
from pathlib import Path, PurePosixPath
from typing import Any

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.storage.artifacts import (
    MANIFEST,
    Damaged,
    check,
    is_complete,
    move_aside,
    read_manifest,
    staging,
    sync,
)

log = logging.getLogger("infini_llama.mirror")
TRIES, PAUSE = 3, 1.0  # of one transfer; seconds before the second, doubled for each further one


class Mirror:
    """A place to which artifacts below `home` are copied under the same relative paths.

    Args:
        url: as fsspec writes it, for example s3://bucket/project, memory://project or a path.
        home: the local counterpart.

    Raises:
        ConfigError: the protocol is unknown or its package is not installed.
    """

    def __init__(self, url: str, home: Path) -> None:
        import fsspec

        self.home, self.url = home, url
        try:
            self.files, self.root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as fault:
            raise ConfigError(f"storage.mirror={url}: {fault}") from None

    def place(self, path: Path) -> str:
        """The place in the mirror of `path`, below home."""
        return f"{self.root.rstrip('/')}/{path.relative_to(self.home).as_posix()}"

    def has(self, path: Path, of: Path | None = None) -> bool:
        """Whether the artifact that is committed at `path` is kept whole, byte for byte the same manifest.

        Args:
            of: where it has been moved to since.
        """
        place = f"{self.place(path)}/{MANIFEST}"
        return self._exists(place) and self.files.cat_file(place) == ((of or path) / MANIFEST).read_bytes()

    def keep(self, path: Path, kind: str) -> int:
        """Copies the artifact at `path`, manifest last; returns the bytes that were sent, 0 where it was kept before.

        Raises:
            Damaged: it is not what its manifest says by sizes; a copy of it would be worthless.
            OSError: the mirror does not take it.
        """
        if self.has(path):
            return 0
        manifest = check(path, kind, checksums=False)
        place, sent = self.place(path), 0
        self._remove_file(f"{place}/{MANIFEST}")  # of an artifact of this name that was built anew
        for name, expected in manifest.files.items():
            self.keep_file(path / name)
            if (size := self.files.size(f"{place}/{name}")) != expected.size:
                raise OSError(f"{place}/{name} has {size} bytes after it was copied, not {expected.size}")
            sent += expected.size
        self.keep_file(path / MANIFEST)
        return sent

    def keep_file(self, path: Path) -> None:
        """Copies one file."""
        place = self.place(path)
        self.files.makedirs(str(PurePosixPath(place).parent), exist_ok=True)
        _several_times(lambda: self.files.put_file(str(path), place))

    def kept(self, folder: Path) -> list[Path]:
        """The artifacts that are kept whole directly below `folder`, as the local paths they would have."""
        place = self.place(folder)
        self.files.invalidate_cache()
        if not self._exists(place):
            return []
        names = [PurePosixPath(entry["name"]).name for entry in self.files.ls(place, detail=True)]
        return [folder / name for name in sorted(names) if self._exists(f"{place}/{name}/{MANIFEST}")]

    def restore(self, path: Path, kind: str) -> bool:
        """Fetches the artifact to `path`, unless it is there, if the mirror has it; used only once every checksum holds.

        Returns:
            whether it is there now.
        """
        if is_complete(path, kind):  # of a restoring that was cut off behind it
            return True
        if not self._exists(f"{self.place(path)}/{MANIFEST}"):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = staging(path)
        try:
            self._fetch(path / MANIFEST, staged / MANIFEST)
            for name in read_manifest(staged, kind).files:  # which refuses names outside the folder
                self._fetch(path / name, staged / name)
            check(staged, kind, checksums=True)
        except (Damaged, FileNotFoundError) as fault:
            log.warning("the copy of %s in %s is damaged and not used: %s", path.name, self.url, fault)
            shutil.rmtree(staged)
            return False
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        for file in staged.rglob("*"):
            sync(file)
        if path.exists():  # not complete, as seen above
            move_aside(path)
        staged.rename(path)
        sync(path.parent)
        log.info("%s was restored from %s", path.relative_to(self.home), self.url)
        return True

    def restore_file(self, path: Path) -> bool:
        """Fetches one file where it is kept, in place of any that is here."""
        if not self._exists(self.place(path)):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        self._fetch(path, part)
        sync(part)
        part.replace(path)
        sync(path.parent)
        return True

    def delete(self, path: Path) -> None:
        """Deletes a kept artifact, its manifest first."""
        self._remove_file(f"{self.place(path)}/{MANIFEST}")
        self.files.rm(self.place(path), recursive=True)

    def _fetch(self, path: Path, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        _several_times(lambda: self.files.get_file(self.place(path), str(to)))

    def _exists(self, place: str) -> bool:
        return bool(self.files.exists(place))

    def _remove_file(self, place: str) -> None:
        if self._exists(place):
            self.files.rm_file(place)


def _several_times(transfer: Any) -> None:
    for number in range(TRIES):
        try:
            transfer()
            return
        except FileNotFoundError:
            raise
        except OSError:
            if number + 1 == TRIES:
                raise
            time.sleep(PAUSE * 2**number)
