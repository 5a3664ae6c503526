"""Files that stand for others.

Git LFS and git-annex leave them in a clone in place of content that was not downloaded.
"""

import os
import re
from pathlib import Path

from infini_llama.configs.errors import DataError, shown_path

LONGEST_POINTER = 1024  # bytes; the specification of Git LFS: a pointer is shorter
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md; hawser was its first name.
LFS = re.compile(
    rb"version https?://(?:git-lfs|hawser)\.github\.com/spec/\S+\s+(?:[\w.-]+ \S+\s+)*oid \w+:"
)
SIZE = re.compile(rb"^size (\d+)\s*$", re.MULTILINE)
# https://git-annex.branchable.com/internals/pointer_file; where a filesystem has no links, a file
# holds the link's target.
ANNEX = re.compile(rb"(?:\S*\.git\S*)?/annex/objects/\S+\s*(?:/annex/[^\n]*\s*)*")
CURE = {"Git LFS": "git lfs pull", "git-annex": "git annex get ."}


def pointer_in(data: bytes) -> str | None:
    """The kind of pointer that a file with these first bytes is, and what to do.

    Args:
        data: its first LONGEST_POINTER bytes, or all of them; of a longer file at least one more,
            since that is no pointer.

    Returns:
        a text that completes '<file> …'; None: the file holds content.
    """
    if len(data) > LONGEST_POINTER:
        return None
    if LFS.match(data):
        size = SIZE.search(data)
        in_bytes = f" of {int(size[1]):,} bytes" if size else ""
        return _sentence("Git LFS", in_bytes)
    return _sentence("git-annex") if ANNEX.fullmatch(data) else None


def refuse_pointer(path: Path) -> None:
    """Refuse a file that stands for another. One that cannot be read is left to its reader.

    Raises:
        DataError: it is a pointer, or a link into a git-annex whose content is missing.
    """
    try:
        if path.stat().st_size > LONGEST_POINTER:
            return
        with path.open("rb") as file:
            fault = pointer_in(file.read(LONGEST_POINTER + 1))
    except OSError:
        fault = dangling(path)
    if fault:
        raise DataError(f"{shown_path(path)} {fault}.")


def dangling(path: Path) -> str | None:
    """The fault of a link that leads into a git-annex and to no file, in the words of `pointer_in`.

    None: the path is no such link.
    """
    try:
        is_annexed = not path.exists() and ANNEX.fullmatch(os.fsencode(path.readlink()))
    except OSError:  # it is no link
        return None
    return _sentence("git-annex") if is_annexed else None


def _sentence(program: str, size: str = "") -> str:
    return (
        f"is a {program} pointer, and the file itself{size} was not downloaded; run "
        f"`{CURE[program]}` in its repository"
    )
