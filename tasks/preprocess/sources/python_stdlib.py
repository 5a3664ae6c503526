"""`source: python-stdlib`: the .py files of the standard library of the running Python."""

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from infini_llama.tasks.preprocess.sources.files import (
    named_files,
    with_validation_files,
)
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.source import Inputs, Source

# Not the standard library's own, its tests (some of them not UTF-8 on purpose), and character
# tables, which are data.
SKIPPED = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
}


class PythonStdlib(Source):
    """The standard library; data.validation_files are held out."""

    license = "PSF-2.0"

    def inputs(self, not_text: NotText) -> Inputs:
        return with_validation_files(
            self, named_files(self, standard_library(), "files"), not_text
        )

    def facts(self) -> dict[str, str]:
        return {"python": platform.python_version()}


def standard_library() -> Iterator[tuple[Path, str]]:
    """The files of the standard library, each with its path below it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED)
        for file in files:
            if file.endswith(".py"):
                path = Path(folder) / file
                yield path, path.relative_to(root).as_posix()


SOURCE = PythonStdlib
