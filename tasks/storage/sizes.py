"""How much a file or folder takes."""

import os
from contextlib import suppress
from pathlib import Path


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed, and what vanishes meanwhile counts nothing."""
    if path.is_symlink() or not path.is_dir():
        with suppress(FileNotFoundError):
            return path.lstat().st_size
        return 0
    total = 0
    for root, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                total += Path(root, name).lstat().st_size
    return total
